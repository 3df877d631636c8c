"""Saving beside the training: one save at a time goes on in a thread, and its errors come out at the next call.

[Note: a group of its own]
The ranks have to agree on whether a save has succeeded, and collectives of the training go on at the same time. Two threads
must not issue collectives over one group, as their order would differ from rank to rank. So the thread has a group to
itself, over gloo, which is made with the first such save.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from colonnade.cluster.mesh import Axis


class PendingSave:
    """A save that goes on in the background.

    Args:
        write: writes it; returns its folder.
    """

    def __init__(self, write: Callable[[], Path]) -> None:
        self._write = write
        self._folder: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._folder = self._write()
        except BaseException as error:  # raised by `wait`
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end, in one way or the other."""
        return not self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait for the end; the folder of the checkpoint. Errors are raised once.

        Raises:
            CheckpointError: the save failed; what was saved before is whole.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._folder


class Background:
    """The saves of one process: at most one is under way."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._world: Axis | None = None
        self._made_for: object = None
        self._is_registered = False

    def world(self) -> Axis:
        """All ranks, over a group that nothing else uses. All ranks call it."""
        if not dist.is_initialized():
            return Axis.alone("checkpoint")
        if self._world is None or self._made_for is not dist.group.WORLD:
            self._world, self._made_for = Axis.of(dist.new_group(backend="gloo"), "checkpoint"), dist.group.WORLD
        return self._world

    def start(self, write: Callable[[], Path]) -> PendingSave:
        """Start a save; the one before has to have been waited for."""
        if (
            not self._is_registered
        ):  # now, so that it comes before what launch has registered: closing the process group
            atexit.register(self.at_exit)
            self._is_registered = True
        self._pending = PendingSave(write)
        return self._pending

    def finish(self) -> None:
        """Wait for the save that is under way, if any.

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def at_exit(self) -> None:
        """Let the program not end before its last checkpoint is written; and not end well where that fails."""
        try:
            self.finish()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(1)


BACKGROUND = Background()
