"""Say in plain words why a disk has not taken what was to be written.

The error of the system goes a long way, through writer processes and other ranks, and may arrive as
text alone. So it is told by its text, which is the same all the way.

    a write fails -> errors.cause_of -> told_in_words -> in_flight.save_error
"""

import errno
import os

from torchtitan.tools import filesystem

_WORDS = {
    errno.ENOSPC: "The disk of {folder} is full: {room}.",
    errno.EDQUOT: "The quota on the disk of {folder} is used up; ask for more, or delete what is yours there.",
    errno.EROFS: (
        "The disk of {folder} is mounted read-only, as it is after the system has found an error on it; "
        "see dmesg."
    ),
    errno.EACCES: "This user may not write there; see to owner and permissions of {folder}.",
    errno.EPERM: "The system forbids this user to write there; see to owner and attributes of {folder}.",
    errno.EIO: "The disk of {folder} does not work as it should; see dmesg.",
}
"""By the number of the error, the most telling first."""


def told_in_words(cause: str, folder: str) -> str:
    """What ``cause``, the text of an error, means for whoever saves into ``folder``; empty if nothing."""
    for number, words in _WORDS.items():
        if os.strerror(number) in cause:
            return words.format(folder=folder, room=_room(folder))
    return ""


def mib(size_bytes: int) -> str:
    """For a message: in MiB, or in GiB from one on."""
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.2f} GiB"
    return f"{size_bytes / 2**20:.1f} MiB"


def _room(folder: str) -> str:
    try:
        room = filesystem.room(folder)
    except OSError:
        room = None  # it is told of one error already
    if room is None:
        return "how much of it is free is not known"
    said = f"{mib(room.free_bytes)} of {mib(room.total_bytes)} are free now"
    return f"{said}, but no more files can be made" if room.free_files == 0 else said
