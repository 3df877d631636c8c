"""The rank's side of `colonnade.testing.ranks`: a process that joins its world and answers calls until dismissed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Longer than any test: a hang is then seen by the pool, which has every rank's stack, and not by one rank's collective.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_STACK_SIGNAL = signal.SIGUSR1
_STACK_WAIT_S = 2.0
_is_rank = False


def is_rank() -> bool:
    """Whether this process is a rank of a pool."""
    return _is_rank


def file(folder: str, rank: int, kind: str) -> Path:
    """Where a rank writes: kind "out" is what it prints, "stack" the stacks that were asked for."""
    return Path(folder) / f"rank{rank}.{kind}"


def serve(rank: int, world: int, folder: str, connection: Connection) -> None:
    """Main function of a rank: sends (succeeded, time, result or traceback) once when ready and once per call."""
    global _is_rank
    _is_rank = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the pool decides what happens
    _end_with_parent()
    multiprocessing.set_start_method("fork", force=True)  # as in a script: worker processes of a data loader start fast
    stack_file = file(folder, rank, "stack").open("w")
    faulthandler.register(_STACK_SIGNAL, file=stack_file, all_threads=True)
    with file(folder, rank, "out").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a rank that is killed has printed its lines
    connection.send_bytes(_answer(_join_world, rank, world, folder))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # dismissed; a clean-up of the process group could only wait for ranks that have left
        connection.send_bytes(_answer(_call, message))


def _answer(step: Callable[..., Any], *args: Any) -> bytes:
    """Run one step and pickle its outcome; by plain pickle, as torch's own would pass tensors as shared descriptors."""
    try:
        return pickle.dumps((True, time.monotonic(), step(*args)))
    except BaseException:  # SystemExit too: whatever ended the call is that rank's report
        return pickle.dumps((False, time.monotonic(), traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _join_world(rank: int, world: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)


def _call(message: bytes) -> Any:
    path, call = pickle.loads(message)
    sys.path[:] = path  # test modules are found where the caller finds them
    torch.manual_seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    fn, args, kwargs = pickle.loads(call)
    return fn(*args, **kwargs)


def _end_with_parent() -> None:
    """Leave as soon as the process that owns the pool is gone, even in the middle of a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch_parent, name="watch parent", daemon=True).start()


def request_stack(pid: int) -> None:
    """Ask a rank, a child of this process, to write its stacks; it does so even while it waits inside a C function."""
    os.kill(pid, _STACK_SIGNAL)


def read_stack(path: Path) -> str:
    """Wait for the stacks that `request_stack` asked for and return those of the rank's own threads."""
    deadline, size = time.monotonic() + _STACK_WAIT_S, -1
    while time.monotonic() < deadline:
        before, size = size, path.stat().st_size
        if size == before > 0:  # has stopped growing: there is no mark for the end of a dump
            break
        time.sleep(0.05)
    threads = path.read_text().strip().split("\n\n")
    shown = "\n\n".join(thread for thread in threads if "in watch_parent" not in thread)
    return shown or "(no stack: the process did not react)"


def signal_name(number: int) -> str:
    """Name of a signal, such as SIGKILL."""
    return signal.Signals(number).name if number in list(signal.Signals) else "unknown"
