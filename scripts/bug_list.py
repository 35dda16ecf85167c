"""Bugs that a checkpointer could have, each as a small change of the sources.

Every one is what somebody could write by mistake, or has written: a line left out, two lines in the other
order, a question asked with the wrong answer. None of them shows while nothing goes wrong.

    BUGS -> seeded_bugs.py; docs/reliability.md has them with their results
"""

from scripts.bug_kinds import Bug, changes, Edit, one_change as _bug

_OURS = "torchtitan/components/checkpointer"


# Words in the names of tests: a bug of both back ends is looked for where it is quickest, and among the
# states that crashes leave. What looks at the order of things by name would notice for another reason.
_DCP, _TC = "disabled and not no_order", "shared and not no_order"
_TWO_RANKS = "ranks]"
_OUR_TESTS = "tests/unit_tests/components/checkpointer"
_IN_PLACE = (f"{_OUR_TESTS}/tc/test_writing_in_place.py",)


_WRITING = (
    _bug(
        "dcp-data-unsynced",
        "`dcp` does not sync the files that it writes",
        f"{_OURS}/dcp_writer.py",
        "            disk.current().sync(file)\n",
        "",
        only=_DCP,
    ),
    _bug(
        "dcp-other-ranks-unsynced",
        "`dcp` syncs the index and what rank 0 writes, and not what the other ranks do",
        f"{_OURS}/dcp_writer.py",
        "            disk.current().sync(file)\n",
        '            if Path(path).name.startswith(("__0_", ".")):\n'
        "                disk.current().sync(file)\n",
        only=f"{_DCP} and {_TWO_RANKS}",
    ),
    _bug(
        "dcp-index-unsynced",
        "`dcp` syncs all data, and not the index that makes it a checkpoint",
        f"{_OURS}/dcp_writer.py",
        "            disk.current().sync(file)\n",
        '            if not Path(path).name.startswith("."):\n                disk.current().sync(file)\n',
        only=_DCP,
    ),
    Bug(
        name="dcp-index-in-place",
        what="`dcp` writes the index under its own name, without a temporary one",
        edits=changes(
            f"{_OURS}/dcp_writer.py",
            (
                "        with _made(os.fspath(path)) as file:\n",
                "        path = Path(path).with_name(Path(path).name.removesuffix('.tmp'))\n"
                "        with _made(os.fspath(path)) as file:\n",
            ),
            ("        disk.current().rename(os.fspath(path), os.fspath(new_path))\n", ""),
            ("        disk.current().unlink(os.fspath(path))\n", "        return\n"),
        ),
        only=_DCP,
    ),
    _bug(
        "manifest-in-place",
        "`dcp` writes the manifest under its own name, without a temporary one",
        f"{_OURS}/dcp_writer.py",
        '        filesystem.write_bytes(f"{os.fspath(self.path)}/{MANIFEST}", content)\n',
        '        with disk.current().create(f"{os.fspath(self.path)}/{MANIFEST}") as file:\n'
        "            file.write(content)\n"
        "            disk.current().sync(file)\n"
        "        filesystem.fsync_dir(os.fspath(self.path))\n",
        only=_DCP,
    ),
    _bug(
        "small-files-unsynced",
        "The manifest of `dcp` gets its name before its content is on the disk",
        "torchtitan/tools/filesystem.py",
        "            disk.current().sync(file)\n",
        "",
        only=_DCP,
    ),
    _bug(
        "tc-data-unsynced",
        "`torch_checkpointing` does not sync the files that it writes",
        f"{_OURS}/tc/storage.py",
        "                disk.current().sync(cast(BinaryIO, self._file))\n",
        "                pass\n",
        only=_TC,
    ),
    _bug(
        "folders-unsynced",
        "The name of a new folder is never synced",
        "torchtitan/tools/filesystem.py",
        "        fsync_dir(os.path.dirname(directory) or os.curdir)\n",
        "        pass\n",
        only=_DCP,
    ),
)

_PUBLISHING = (
    _bug(
        "tc-names-unsynced",
        "`torch_checkpointing` publishes a directory whose names were not synced",
        f"{_OURS}/tc/storage.py",
        "            filesystem.fsync_dir(os.fspath(src_path))\n        try:\n",
        "            pass\n        try:\n",
        only=_TC,
    ),
    _bug(
        "tc-publish-unsynced",
        "`torch_checkpointing` does not sync the final name of a checkpoint",
        f"{_OURS}/tc/storage.py",
        "        for folder in dict.fromkeys((dst_path.parent, src_path.parent)):\n"
        "            filesystem.fsync_dir(os.fspath(folder))\n",
        "",
        only=_TC,
    ),
    Bug(
        name="tc-publish-early",
        what="`torch_checkpointing` publishes first, and syncs the names inside afterwards",
        edits=changes(
            f"{_OURS}/tc/storage.py",
            (
                "            filesystem.fsync_dir(os.fspath(src_path))\n        try:\n",
                "            pass\n        try:\n",
            ),
            (
                "            filesystem.fsync_dir(os.fspath(folder))\n",
                "            filesystem.fsync_dir(os.fspath(folder))\n"
                "        if os.path.isdir(dst_path):\n"
                "            filesystem.fsync_dir(os.fspath(dst_path))\n",
            ),
        ),
        only=_TC,
    ),
    _bug(
        "tc-in-place",
        "`torch_checkpointing` writes where a checkpoint is looked for, without a staging directory",
        f"{_OURS}/tc/defaults.py",
        "        barrier_config=barrier,\n        checkpoint_write_barrier_timeout_sec=whole_seconds,\n",
        "        barrier_config=barrier,\n        write_to_temp_dir=False,\n"
        "        checkpoint_write_barrier_timeout_sec=whole_seconds,\n",
        only=_TC,
    ),
    _bug(
        "dcp-marker-first",
        "`dcp` puts an index there, to be filled later, before any data",
        f"{_OURS}/dcp_writer.py",
        "        return super().prepare_global_plan(plans)\n",
        '        filesystem.write_bytes(f"{os.fspath(self.path)}/{MARKER}", b"")\n'
        "        return super().prepare_global_plan(plans)\n",
        only=_DCP,
    ),
    _bug(
        "tc-early-answer",
        "A rank calls its save complete before rank 0 has published it",
        f"{_OURS}/tc/commit.py",
        "        own = self._files_of(self._rank)\n",
        "        if stop is _Stop.PUBLISHED and self._rank != 0:\n            return None\n"
        "        own = self._files_of(self._rank)\n",
        tests=(f"{_OUR_TESTS}/tc/test_commit.py",),
    ),
    _bug(
        "early-answer",
        "A save in the background is called complete as soon as it has begun",
        f"{_OURS}/in_flight.py",
        "            result_within(future, wait_seconds)\n    except FAILURES as error:\n"
        "        if report is None:\n            raise\n        folder",
        "            pass\n    except FAILURES as error:\n"
        "        if report is None:\n            raise\n        folder",
        tests=(f"{_OUR_TESTS}/test_background_saves.py",),
    ),
)

_REPLACING = (
    _bug(
        "delete-before-commit",
        "A checkpoint whose step is saved again is deleted first",
        f"{_OURS}/housekeeping.py",
        "        aside = put_aside(self._storage, self.folder, path)\n",
        '        self._remove(path, "whose step is saved again")\n        aside = path\n',
        only=_DCP,
    ),
    _bug(
        "write-over",
        "A checkpoint whose step is saved again is written over, and put nowhere before",
        f"{_OURS}/housekeeping.py",
        "        aside = put_aside(self._storage, self.folder, path)\n",
        "        aside = path\n",
        only=_DCP,
    ),
    _bug(
        "replaced-deleted-early",
        "What waits for a save of its step is deleted although that save has died",
        f"{_OURS}/housekeeping.py",
        "            if path in waiting or is_going or self._is_left_or_damaged(step, path):\n",
        "            if is_going or self._is_left_or_damaged(step, path):\n",
        only=_DCP,
    ),
    _bug(
        "replaced-preferred",
        "What was replaced is loaded in the place of what has replaced it",
        f"{_OURS}/discovery.py",
        "            candidates[step] = [*there, path] if is_replaced else [path, *there]\n",
        "            candidates[step] = [path, *there]\n",
        only=_DCP,
    ),
)

_ROLLING_BACK = (
    _bug(
        "future-stays",
        "After a rollback the checkpoints of the history that was left stay where they are",
        f"{_OURS}/housekeeping.py",
        "        if self._history_settled or self._loaded_step is None:\n",
        "        if True:\n",
        only=_DCP,
    ),
    Bug(
        name="loaded-step-leaves",
        what="The step that was gone back to is put aside with the history that was left",
        edits=(
            Edit(
                path=f"{_OURS}/housekeeping.py", old="if newer > step}\n", new="if newer >= step}\n"
            ),
            Edit(path=f"{_OURS}/history.py", old="if step > than)", new="if step >= than)"),
        ),
        only=_DCP,
    ),
)

_DELETING = (
    _bug(
        "one-too-few",
        "Retention keeps one checkpoint less than it should while a save is written",
        f"{_OURS}/retention.py",
        "        gone = self._beyond(full, self.keep_latest - needs_place)\n",
        "        gone = self._beyond(full, self.keep_latest - needs_place - 1)\n",
        only=_DCP,
    ),
    _bug(
        "leftovers-take-places",
        "Retention counts directories that a save has left which died",
        f"{_OURS}/purging.py",
        "    is_complete = not is_staging and finder.is_complete_for_any(path)\n",
        "    is_complete = not is_staging\n",
        only=_DCP,
    ),
    Bug(
        name="pins-ignored",
        what="Nobody looks for a file PIN, neither who chooses what expires nor who deletes it",
        edits=(
            Edit(path=f"{_OURS}/retention.py", old="not self.is_pinned and ", new=""),
            Edit(
                path=f"{_OURS}/deletions.py",
                old="            if is_pinned(self._storage, path):\n",
                new="            if False:\n",
            ),
        ),
        only=_DCP,
    ),
    _bug(
        "no-tombstone",
        "A deletion begins with any file, and leaves the manifest until its turn comes",
        f"{_OURS}/storage.py",
        "    for marker in markers:\n",
        "    for marker in ():\n",
        only=_DCP,
    ),
    _bug(
        "renames-unsynced",
        "A new name is not synced, such as that by which a deletion begins",
        "torchtitan/tools/filesystem.py",
        "    fsync_dir(dst_folder)\n    if src_folder != dst_folder:\n        fsync_dir(src_folder)\n",
        "",
        only=_DCP,
    ),
    _bug(
        "deletions-stay-cut",
        "What a deletion has left that was cut short is never deleted",
        f"{_OURS}/purging.py",
        "        for path in (*purge.half_deleted, *purge.expired):\n",
        "        for path in purge.expired:\n",
        only=_DCP,
    ),
    _bug(
        "leftovers-stay",
        "What a save has left that died is never deleted",
        f"{_OURS}/purging.py",
        "        for path in purge.abandoned:\n            self._remove_leftover(path)\n",
        "",
        only=_DCP,
    ),
)

_STARTING = (
    _bug(
        "unfinished-counts",
        "A directory counts as a checkpoint without an index and without a manifest",
        f"{_OURS}/discovery.py",
        "        if found is not None or not self.storage.isfile(filesystem.join(path, MANIFEST)):\n"
        "            return found\n",
        "        if found is not None:\n            return found\n",
        only=_DCP,
    ),
    _bug(
        "leftovers-taken-over",
        "What a save has left that died becomes part of the next one of its step",
        f"{_OURS}/torch_checkpointing.py",
        "        return self._clear_leftover(staging_id) if self._storage.isdir(staging_id) else []\n",
        "        return []\n",
        only=_TC,
    ),
)

_FAILING = (
    _bug(
        "start-unsynced",
        "What a start goes on from is not synced, which a run that was killed may not have come to",
        f"{_OURS}/starting.py",
        "            self._make_durable(self._source)\n",
        "",
        only="goes_on_from_is_durable",
    ),
    _bug(
        "lock-unsynced",
        "The lock of a folder gets its name before its content is on the disk",
        f"{_OURS}/lock_file.py",
        "            disk.current().sync(file)\n            yield temporary, file\n",
        "            file.flush()\n            yield temporary, file\n",
        only=_DCP,
        may_wait=True,
    ),
    _bug(
        "faults-swallowed",
        "An error of a sync is passed over",
        f"{_OURS}/tc/storage.py",
        "                disk.current().sync(cast(BinaryIO, self._file))\n",
        "                try:\n                    disk.current().sync(cast(BinaryIO, self._file))\n"
        "                except OSError:\n                    pass\n",
        only=_TC,
    ),
    _bug(
        "failed-save-counts",
        "`dcp` tells that a save has failed, and leaves its index there",
        f"{_OURS}/dcp_writer.py",
        "            self._take_back()\n",
        "",
        only=_DCP,
    ),
    _bug(
        "tc-failed-save-counts",
        "`torch_checkpointing` tells that a save has failed after it had its name, and leaves it that",
        f"{_OURS}/tc/writer.py",
        "                self._take_back(Path(path), folder)\n",
        "                pass\n",
        only=_TC,
    ),
    _bug(
        "levels-unsynced",
        "Of folders that were there already no name is synced, whoever has made them and died",
        "torchtitan/tools/filesystem.py",
        "        _sync_names_of(os.path.abspath(parent or os.curdir))\n",
        "        pass\n",
        only="killed_then_cut",
    ),
    _bug(
        "takes-from-others",
        "A failed save of `torch_checkpointing` takes back what another run may have saved meanwhile",
        f"{_OURS}/tc/writer.py",
        "            self._may_publish()\n            # A marker alone",
        "            # A marker alone",
        tests=_IN_PLACE,
    ),
    _bug(
        "one-rank-alone-fails",
        "What another rank of `torch_checkpointing` fails with after the name was given leaves it that",
        f"{_OURS}/tc/writer.py",
        "            with self._undone_by(OtherRankFailedError, path, folder):\n"
        "                commit.publish()\n",
        "            commit.publish()\n",
        tests=_IN_PLACE,
    ),
)

BUGS = (
    *_WRITING,
    *_PUBLISHING,
    *_REPLACING,
    *_ROLLING_BACK,
    *_DELETING,
    *_STARTING,
    *_FAILING,
)
