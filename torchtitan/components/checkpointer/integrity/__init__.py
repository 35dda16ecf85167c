"""What a checkpoint was when it was saved, and whether it still is that.

    save: every file -> digests.HashingStream -> FileDigest -> manifest.py (rank 0, written last)
    load: manifest.py -> verification.py -> every file -> checked_file.CheckedFile -> whoever reads it

Both back ends use all of it; nothing in here knows one of them.
"""
