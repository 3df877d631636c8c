"""A rank that fails ends its job: within seconds, its own traceback first.

[Note: who speaks, and in which order]
The first rank to fail claims the job's failure in the store, prints its traceback and only then publishes what
happened. The others learn of it in one of two ways: a collective with the failed rank breaks (their exception is then a
*consequence*), or their watchdog thread reads it from the store while they compute or wait. Either way they print one
line that names the first, so its traceback comes before anything they say. The first leaves as soon as they have all
acknowledged; they leave a little later, so that the launcher too sees the true culprit fail first.

A rank that is killed publishes nothing. Then a peer whose collective broke waits in vain for a failure to read, becomes
the first itself and prints its traceback, which names the collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from colonnade.errors import CommunicationError

_POLL_S = 0.5  # how often the watchdog asks the store
_RECORD_S = 2.0  # how long a consequence waits for its cause to be published
_ACKNOWLEDGE_S = 1.5  # how long the first to fail waits for the others; three polls
_LINGER_S = 2.0  # how long the others stay after that; more than _ACKNOWLEDGE_S, see the note above
_HOST_S = 3.0  # how long the host of the store waits at its end for the ranks that still use it
_LEAVER_S = 1.0  # how long a rank whose peer has left waits for the launcher to see that one's exit code
_LIMIT_S = 8.0  # after this a failing process ends whatever it is doing
_PEER_GONE = ("gloo/transport", "NCCL", "Connection closed by peer", "Connection reset by peer")

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What one rank tells the others when it fails.

    Args:
        rank: the global rank.
        summary: type and first line of its error.
        consequence: whether the error only says that a peer is gone.
        time: seconds since the epoch.
    """

    rank: int
    summary: str
    consequence: bool
    time: int


class _Board:
    """The job's notes in the store: who failed first, how many have read it, who has left.

    No call waits for a peer. Once the store's host is gone every call raises RuntimeError, the first after torch has
    printed a warning of its own; the others do not ask again.
    """

    def __init__(self, store: Any) -> None:  # Any: torch's stubs leave out clone and append
        self._store = store.clone()  # a connection of its own: one that waits for a key would block the others
        self._gone = False

    def claim(self, rank: int) -> int:
        """Ask to be the first failure; the answer is the rank that is."""
        return int(self._ask(lambda store: store.compare_set("claim", "", str(rank))))

    def publish(self, failure: Failure) -> None:
        self._ask(lambda store: store.set("failure", json.dumps(asdict(failure))))

    def failure(self) -> Failure | None:
        text = self._ask(lambda store: store.get("failure") if store.check(["failure"]) else None)
        return None if text is None else Failure(**json.loads(text))

    def acknowledge(self) -> None:
        self._ask(lambda store: store.add("acknowledged", 1))

    def acknowledged(self) -> int:
        return self._ask(lambda store: store.add("acknowledged", 0))

    def leave(self, rank: int) -> None:
        self._ask(lambda store: store.append("left", f"{rank} "))

    def left(self) -> list[int]:
        text = self._ask(lambda store: store.get("left") if store.check(["left"]) else b"")
        return [int(rank) for rank in text.split()]

    def _ask(self, question: Callable[[Any], T]) -> T:
        if self._gone:
            raise RuntimeError("the process that served the job's store has ended")
        try:
            return question(self._store)
        except RuntimeError:
            self._gone = True
            raise


class FailureGuard:
    """Tells the job when this rank fails, and ends this rank when another has failed.

    From its construction an uncaught exception of the main thread ends the process with code 1 (130 after Ctrl-C).
    `SystemExit` is the script's own way to end and is left alone; so are exceptions in other threads.

    Args:
        store: store of the job; the guard opens connections of its own.
        rank, world_size: this process among all.
        previous_hook: the `sys.excepthook` to go back to; one that is not Python's own prints the traceback its way.
        store_host: rank that serves the store, so the others need it to be the last to leave; None for the launcher.
        error_file: where the launcher looks for this rank's error (torchelastic's JSON), if anywhere.
        launcher_pid: parent process without which this one must not go on, if any.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        previous_hook: Callable[..., Any],
        store_host: int | None = None,
        error_file: str | None = None,
        launcher_pid: int | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = store  # kept: where this process hosts it, it lives as long as the guard
        self._board = _Board(store)
        self._previous_hook = previous_hook
        self._store_host, self._error_file, self._launcher_pid = store_host, error_file, launcher_pid
        self.pid = os.getpid()  # a process forked by this one has the guard too, but is no rank
        self._ending = threading.Lock()  # taken once, by the thread that ends this process
        self._closed = threading.Event()
        self._told_to_stop = False
        sys.excepthook = self._on_exception
        self._watchdog = threading.Thread(target=self._watch, name="failure watchdog", daemon=True)
        self._watchdog.start()

    # ---- a normal end

    def leave(self) -> None:
        """Note that this rank's script has ended, for the error of a rank that still counts on it."""
        _within(1.0, lambda: self._board.leave(self.rank), None)

    def serve_until_all_left(self) -> None:
        """Where this process hosts the store, wait some seconds for the ranks that still use it."""
        if self._store_host == self.rank:
            _within(_HOST_S, lambda: self._poll_until(self._all_left, _HOST_S), None)

    def close(self) -> None:
        """Stop watching and give `sys.excepthook` back."""
        self._closed.set()
        self._watchdog.join(1.0)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook

    # ---- this rank fails

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self.pid:
            self._previous_hook(kind, error, trace)
            return
        self._end_at_last(_LIMIT_S)
        if not self._ending.acquire(blocking=False):  # the watchdog is ending this process and has said why
            time.sleep(_LIMIT_S)
            _leave_process(1)
        if threading.current_thread() is threading.main_thread():  # Python lets no other set a handler
            signal.signal(signal.SIGTERM, self._on_terminate)
        interrupted = isinstance(error, KeyboardInterrupt)
        own = Failure(self.rank, _summary(error), _is_consequence(error), int(time.time()))
        cause = self._cause_of(own)
        if cause is None:
            self._fail_first(own, error)
        else:
            self._fail_after(cause, own, error)
        _leave_process(130 if interrupted else 1)

    def _cause_of(self, own: Failure) -> Failure | None:
        """The failure of another rank that came before this one; None where this rank is the first."""
        if own.consequence:
            cause = _within(_RECORD_S, lambda: self._await_failure(or_reason_to_stop=True), None)
            if cause is not None:
                return cause
        if _within(_RECORD_S, lambda: self._board.claim(self.rank), self.rank) == self.rank:
            return None
        return _within(_RECORD_S, self._await_failure, None)  # the claimant publishes once it has printed

    def _fail_first(self, own: Failure, error: BaseException) -> None:
        left: list[int] = _within(1.0, self._board.left, []) if own.consequence else []
        note = f"{_ranks(left)} had left the job before: the script had ended there." if left else ""
        self._say_in_full(own, error, note)
        self._write_error_file(own, _message(error) + (f"\n{note}" if note else ""), error)
        _within(1.0, lambda: self._board.publish(own), None)
        self._poll_until(lambda: not left, _LEAVER_S)
        _within(_ACKNOWLEDGE_S, lambda: self._poll_until(self._all_know, _ACKNOWLEDGE_S), None)

    def _fail_after(self, cause: Failure, own: Failure, error: BaseException) -> None:
        if own.summary == cause.summary or own.consequence:
            self._say_after(cause, own)
            self._write_error_file(_following(cause, self.rank), _stopped_by(cause), error, cause.rank)
        else:  # an error of its own, at the same time
            self._say_in_full(own, error)
            self._write_error_file(own, _message(error), error)
        _within(1.0, self._board.acknowledge, None)
        self._poll_until(lambda: isinstance(error, KeyboardInterrupt), _LINGER_S)

    def _say_in_full(self, own: Failure, error: BaseException, note: str = "") -> None:
        head = f"rank {self.rank} of {self.world_size} failed: {own.summary}\n"
        tail = f"{note}\n" if note else ""
        if isinstance(error, KeyboardInterrupt):
            _write(head)
        elif self._previous_hook is sys.__excepthook__:
            _write(head + "".join(traceback.format_exception(type(error), error, error.__traceback__)) + tail)
        else:
            _write(head + tail)
            self._previous_hook(type(error), error, error.__traceback__)

    def _say_after(self, cause: Failure, own: Failure) -> None:
        if own.summary.startswith("KeyboardInterrupt"):
            return  # Ctrl-C reached all ranks; the first has said so
        if own.summary == cause.summary:
            _write(f"rank {self.rank}: failed with the same error as rank {cause.rank}.\n")
        elif cause.consequence:
            _write(f"rank {self.rank}: failed like rank {cause.rank}: {own.summary}\n")
        else:
            _write(f"rank {self.rank}: {_stopped_by(cause)}\n")

    # ---- another rank fails

    def _watch(self) -> None:
        store_answers = self.world_size > 1
        while not self._closed.wait(_POLL_S):
            if self._launcher_pid is not None and os.getppid() != self._launcher_pid:
                self._end(f"rank {self.rank}: stopped, because the process that started it has ended.\n")
            if store_answers:
                try:
                    cause = self._board.failure()
                    store_answers = self._store_host is None or self._store_host not in self._board.left()
                except RuntimeError:
                    # Its host has left the job. That by itself is no failure of this rank: what it still needs from
                    # that peer breaks in a collective, with an error that names it.
                    store_answers = False
                    continue
                if cause is not None and cause.rank != self.rank:
                    self._end(f"rank {self.rank}: {_stopped_by(cause)}\n", cause)

    def _end(self, line: str, cause: Failure | None = None) -> None:
        """End this process from the watchdog's thread, whatever the main thread is doing."""
        if not self._ending.acquire(blocking=False):
            return  # the main thread has failed by itself and is about to end the process
        self._end_at_last(_LIMIT_S)
        _write(line)
        if cause is not None:
            self._write_error_file(_following(cause, self.rank), _stopped_by(cause), cause_rank=cause.rank)
            _within(1.0, self._board.acknowledge, None)
            time.sleep(_LINGER_S)
        _leave_process(1)

    # ---- common parts

    def _on_terminate(self, signum: int, frame: object) -> None:
        self._told_to_stop = True

    def _poll_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Ask every 50 ms until it is so, the time is over, or a SIGTERM says to leave now."""
        deadline = time.monotonic() + seconds
        while not done() and not self._told_to_stop and time.monotonic() < deadline:
            time.sleep(0.05)

    def _await_failure(self, or_reason_to_stop: bool = False) -> Failure | None:
        """Wait for a published failure; where asked, only until a rank has left or a SIGTERM says to leave now."""
        deadline = time.monotonic() + _RECORD_S
        while time.monotonic() < deadline:
            failure = self._board.failure()
            if failure is not None:
                return failure
            if or_reason_to_stop and (self._told_to_stop or self._board.left()):
                return None
            time.sleep(0.05)
        return None

    def _all_left(self) -> bool:
        return len(self._board.left()) >= self.world_size

    def _all_know(self) -> bool:
        return self._board.acknowledged() + len(self._board.left()) >= self.world_size - 1

    @staticmethod
    def _end_at_last(seconds: float) -> None:
        """End the process after so long even if a blocked pipe or a lock keeps it from doing so in good order."""
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _write_error_file(
        self, failure: Failure, message: str, error: BaseException | None = None, cause_rank: int | None = None
    ) -> None:
        """Tell the launcher, in the form that torchelastic documents; it takes the earliest time for the root cause.

        The last two fields of extraInfo are ours, for the page that `colonnade run` prints.
        """
        if self._error_file is None:
            return
        stack = "".join(traceback.format_exception(type(error), error, error.__traceback__)) if error else ""
        extra = {
            "py_callstack": stack,
            "timestamp": str(failure.time),
            "consequence": failure.consequence,
            "cause_rank": cause_rank,
        }
        try:
            with open(self._error_file, "w") as file:
                json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        except OSError as problem:
            _write(f"rank {self.rank}: the error file of the launcher could not be written: {problem}\n")


def _is_consequence(error: BaseException) -> bool:
    """Whether the error, or one that led to it, only says that a peer did not answer."""
    return any(
        isinstance(e, (CommunicationError, dist.DistError))
        or (isinstance(e, RuntimeError) and any(mark in str(e) for mark in _PEER_GONE))
        for e in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _summary(error: BaseException) -> str:
    return _message(error).strip().partition("\n")[0][:240]


def _stopped_by(cause: Failure) -> str:
    return f"stopped, because rank {cause.rank} failed: {cause.summary}"


def _following(cause: Failure, rank: int) -> Failure:
    return Failure(rank, cause.summary, True, max(int(time.time()), cause.time + 1))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _within(seconds: float, step: Callable[[], T], default: T) -> T:
    """Result of a step that asks the store; the default where its host is gone or does not answer in time.

    A process that is about to end must neither wait for a machine that hangs nor lose its own error to a second one.
    """
    result = [default]

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # what the store raises when its host is gone
            result[0] = step()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds + 0.5)
    return result[0]


def _write(text: str) -> None:
    """Write to stderr at once, so that the lines of two ranks do not mix."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _leave_process(code: int) -> None:
    """End without the clean-up of a normal exit, which could wait for peers."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where nobody reads the pipe any more
        os._exit(code)
