"""Run a function on several ranks, within one test session, without paying for the start of the ranks each time.

    run_on_ranks(2, train_and_return_loss, "llama")      # [result of rank 0, result of rank 1]

    @on_ranks(2)
    def test_all_reduce_adds_up(): ...                   # the body runs on both ranks

One pool of processes per world size is forked on first use from a server that has torch and transformers imported, and
stays alive; its ranks form a gloo world on the loopback interface, one thread each. A call that fails, crashes or hangs
ends its pool, and the next call starts a new one.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from colonnade.errors import UsageError, explain
from colonnade.testing import rank_process

START_TIMEOUT_S = 120.0  # the first pool waits for the server's imports
PRELOADED = "colonnade.testing.preload"  # what the server imports before it forks
GRACE_S = 2.0  # after one rank failed, the others may still finish, or fail by themselves, this long
_context = multiprocessing.get_context("forkserver")
_pools: dict[int, RankPool] = {}


class RankFailure(AssertionError):
    """A function did not return on every rank; the text has what happened on each, the first to fail first.

    Attributes:
        reports: by rank, its traceback, its stack at the moment it was killed, or how its process ended. A rank that
            returned is not in it.
    """

    def __init__(self, message: str, reports: dict[int, str]) -> None:
        super().__init__(message)
        self.reports = reports


def run_on_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60, **kwargs: Any) -> list[Any]:
    """Call `fn(*args, **kwargs)` on each of `world` ranks and return the results in the order of the ranks.

    On every rank the default process group is initialised; before each call the seed is 0, the default dtype float32.
    Arguments and results travel as bytes, tensors by value.

    Args:
        world: number of ranks, 1 included.
        fn: a function that can be imported by name: defined at the top of a module.
        timeout_s: seconds after which ranks that have not returned count as hanging.

    Raises:
        RankFailure: an AssertionError, where any rank raised, died or hung.
        UsageError: where the function or an argument cannot be sent, or the caller is itself such a rank.
    """
    if rank_process.is_rank():
        raise UsageError("run_on_ranks was called from inside a rank; call it from the test process.")
    try:
        call = pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            explain(
                f"{_name(fn)} cannot be sent to the ranks: {error}",
                [("needs", "a function defined at the top of a module, and arguments that can be pickled")],
            )
        ) from error
    return _pools.setdefault(world, RankPool(world)).run(call, _name(fn), timeout_s)


def on_ranks(world: int, timeout_s: float = 60) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a test: its body runs on each of `world` ranks, and it passes where all of them return."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            if rank_process.is_rank():  # ranks import this wrapper by the test's name
                test(*args, **kwargs)
            else:
                run_on_ranks(world, wrapper, *args, timeout_s=timeout_s, **kwargs)

        return wrapper

    return decorate


def preload() -> None:
    """Start the server that ranks are forked from; it imports torch and transformers while the caller goes on."""
    _context.set_forkserver_preload([PRELOADED])
    # The server is a fresh interpreter: it finds modules through PYTHONPATH, not through this process's sys.path.
    with _environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(path for path in sys.path if path)):
        forkserver.ensure_running()


def close_pools() -> None:
    """End the ranks of all pools. Registered to run at the end of this process; a later call starts new ones."""
    for pool in _pools.values():
        pool.close()


atexit.register(close_pools)  # runs before multiprocessing's own, which would wait for the ranks


class RankPool:
    """`world` processes that wait for calls. Processes exist from the first call until a failure or `close`."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        self._out_starts = [0] * world

    def run(self, call: bytes, name: str, timeout_s: float) -> list[Any]:
        """Run a pickled call on every rank; see `run_on_ranks`."""
        if not self._processes or not all(process.is_alive() for process in self._processes):
            self.close()
            self._start()
        try:
            message = pickle.dumps((list(sys.path), call))
            self._out_starts = [path.stat().st_size for path in self._files("out")]
            for connection in self._connections:
                connection.send_bytes(message)
            results = self._collect(name, timeout_s)
            for rank, text in enumerate(self._output()):  # shown where the test's own output is
                for line in text.splitlines():
                    print(f"[rank {rank}] {line}")
            return results
        except BaseException:  # an interrupt included: ranks that are still at work must not meet the next call
            self.close()
            raise

    def close(self) -> None:
        """End the ranks, at work or not."""
        for connection in self._connections:
            connection.close()  # an idle rank reads the end of the stream and leaves
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        preload()
        self._out_starts = [0] * self.world
        self._folder = TemporaryDirectory(prefix="colonnade-ranks-")
        for rank in range(self.world):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=rank_process.serve, args=(rank, self.world, self._folder.name, theirs), name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._collect(f"the start of {self.world} ranks", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _collect(self, name: str, timeout_s: float) -> list[Any]:
        """Wait for every rank's answer; raise RankFailure where one is missing or an error."""
        results: dict[int, Any] = {}
        failed: dict[int, tuple[float, str]] = {}  # by rank: when, and what to report
        deadline = time.monotonic() + timeout_s
        while waiting := [rank for rank in range(self.world) if rank not in results and rank not in failed]:
            if not self._wait(waiting, deadline - time.monotonic()):
                break
            for rank in waiting:
                answer = self._answer(rank)
                if answer is None:
                    continue
                succeeded, when, value = answer
                if succeeded:
                    results[rank] = value
                else:
                    failed[rank] = (when, value)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) == self.world:
            return [results[rank] for rank in range(self.world)]
        raise self._failure(name, failed, waiting, timeout_s)

    def _wait(self, ranks: list[int], seconds: float) -> bool:
        """Whether a rank has answered or ended within the time."""
        events = [self._connections[rank] for rank in ranks] + [self._processes[rank].sentinel for rank in ranks]
        return bool(wait(events, max(seconds, 0)))

    def _answer(self, rank: int) -> tuple[bool, float, Any] | None:
        """(success, when, result or report) of a rank that has answered or whose process has ended, else None."""
        process, connection = self._processes[rank], self._connections[rank]
        ended = not process.is_alive()  # asked first: what a rank sent before it ended is then in the pipe
        try:
            if connection.poll():
                return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process.join(GRACE_S)
            ended = True
        # Time 0: a process that ended is the cause of the errors that others may have reported before this was noticed.
        return (False, 0.0, _how_it_ended(process.exitcode)) if ended else None

    def _failure(
        self, name: str, failed: dict[int, tuple[float, str]], waiting: list[int], timeout_s: float
    ) -> RankFailure:
        order = sorted(failed, key=lambda rank: failed[rank][0])
        stacks = self._stacks(waiting)
        if order:
            headline = f"{name} failed on rank {order[0]} of {self.world}."
            why_killed = f"still running {GRACE_S:g} s after rank {order[0]} failed"
        else:
            headline = f"{name} did not return within {timeout_s:g} s on {_ranks(waiting)} of {self.world}."
            why_killed = f"still running after {timeout_s:g} s"
        reports = {rank: failed[rank][1] for rank in order}
        reports |= {rank: f"{why_killed}; killed at\n{stacks[rank]}" for rank in waiting}
        returned = [rank for rank in range(self.world) if rank not in reports]
        parts = [headline]
        output = self._output()
        for rank, report in reports.items():
            parts.append(f"─── rank {rank} ───\n{report.strip()}")
            if output[rank].strip():
                parts.append(f"last output of rank {rank}:\n{output[rank][-2000:].strip()}")
        if returned:
            parts.append(f"{_ranks(returned)} returned.")
        return RankFailure("\n\n".join(parts), reports)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """The current Python stacks of ranks that are at work."""
        files = self._files("stack")
        for rank in ranks:
            rank_process.request_stack(self._processes[rank].pid)
        return {rank: rank_process.read_stack(files[rank]) for rank in ranks}

    def _files(self, kind: str) -> list[Path]:
        return [rank_process.file(self._folder.name, rank, kind) for rank in range(self.world)]

    def _output(self) -> list[str]:
        """What each rank has printed since the call began."""
        texts = []
        for path, start in zip(self._files("out"), self._out_starts):
            with path.open("rb") as stream:
                stream.seek(start)
                texts.append(stream.read().decode(errors="replace"))
        return texts


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "the process closed its connection and went on."
    if exitcode < 0:
        return f"the process was ended by signal {-exitcode} ({rank_process.signal_name(-exitcode)})."
    return f"the process ended with exit code {exitcode}."


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', repr(fn))}"


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
