"""`colonnade run`: torchrun underneath, with our checks before and a readable page of errors after."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.machinery
import importlib.util
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import LaunchConfig, elastic_launch

from colonnade.cluster.launch import available_processors
from colonnade.errors import CommunicationError, UsageError, explain

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SHUTDOWN_S = 5  # what a process gets between SIGTERM and SIGKILL
_HINTS = {
    "SIGKILL": "often the machine ran out of memory: `dmesg` says so",
    "SIGTERM": "something outside asked it to end: a scheduler, or a person",
    "SIGSEGV": "a crash in native code: PYTHONFAULTHANDLER=1 shows where",
    "SIGABRT": "native code gave up: its message is above",
    "SIGBUS": "often /dev/shm is full",
}
_EXAMPLE = """\
examples:
  colonnade run --nproc-per-node 2 script.py --lr 0.1
  colonnade run --nproc-per-node 4 -m package.module
  colonnade run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 8 script.py   (and rank 1 on the other)

Options of `colonnade run` stand before the script; what follows it goes to the script.
The exit code is 0 only if every process ended with 0."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a job.

    Args:
        count: number of machines, each running this command.
        rank: which of them this is.
        host, port: where machine 0 listens.
    """

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 29500


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `run` to the commands."""
    parser = subparsers.add_parser(
        "run",
        help="start a script on several processes",
        description="Start a script on several processes that train together.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="processes on this machine (default: one for each accelerator, 2 without any)",
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of machines (default 1)")
    parser.add_argument("--node-rank", type=int, metavar="R", help="which of the machines this is, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="address of machine 0")
    parser.add_argument(
        "--master-port", type=int, default=29500, metavar="PORT", help="a free port there (default 29500)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the Python script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Handle `colonnade run`; returns the exit code."""
    nodes = _nodes(args)
    nproc = default_nproc() if args.nproc_per_node is None else args.nproc_per_node
    if args.module:
        return start_workers(nproc, args.args, module=args.script, nodes=nodes)
    return start_workers(nproc, [args.script, *args.args], nodes=nodes)


def default_nproc() -> int:
    """One process for each accelerator of this machine; 2 on a machine without any."""
    return torch.accelerator.device_count() or 2


def start_workers(nproc: int, argv: list[str], module: str | None = None, nodes: Nodes = Nodes()) -> int:  # noqa: B008
    """Start the processes of a job on this machine, wait for them, and explain a failure on stderr.

    A process that fails ends the others within seconds, and none outlives this call. To be called from the main thread,
    as it passes signals on.

    Args:
        nproc: number of processes on this machine.
        argv: script and its arguments; with `module`, the arguments only.
        module: name of a module to run instead of a script.
        nodes: the machines of the job; by default this one alone.

    Returns:
        0 if every process ended with 0; else the exit code of the one that failed first, 128 + number for a signal.

    Raises:
        UsageError: before anything is started: no such script or module, fewer than 1 process.
        CommunicationError: where the other machines cannot be reached.
    """
    _check(nproc, argv, module)
    command = ["-u", "-m", module, *argv] if module else ["-u", *argv]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="colonnade-run-") as folder, _surroundings(nproc):
        try:
            elastic_launch(_config(nproc, nodes, folder), sys.executable)(*command)
        except ChildFailedError as error:
            _end_process_groups(error.failures)
            print(_page(error.failures, nproc * nodes.count, time.monotonic() - started), file=sys.stderr, flush=True)
            return _exit_code(_culprit(error.failures)[1].exitcode)
        except SignalException as error:
            print(f"colonnade run: all processes were ended by {error.sigval.name}.", file=sys.stderr, flush=True)
            return 128 + error.sigval
        except (RendezvousError, dist.DistError) as error:
            where = f"machine {nodes.rank} of {nodes.count} could not join the job at {nodes.host}:{nodes.port}"
            advice = (
                "the same --nnodes, --master-addr and --master-port on all machines, and a port that is free and open"
            )
            raise CommunicationError(explain(f"{where}: {error}", [("try", advice)])) from error
    return 0


def _check(nproc: int, argv: list[str], module: str | None) -> None:
    if nproc < 1:
        raise UsageError(
            explain(f"--nproc-per-node {nproc}: a job needs at least 1 process.", [("try", "--nproc-per-node 2")])
        )
    if module:
        top = module.partition(".")[0]
        here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])  # `python -m` looks there too
        if here is None and importlib.util.find_spec(top) is None:
            raise UsageError(f"there is no module {module!r} in this Python environment or in {os.getcwd()}.")
    elif not argv:
        raise UsageError("a script is needed: colonnade run --nproc-per-node 2 script.py")
    elif not os.path.exists(argv[0]):
        script = Path(argv[0])
        nearby = [p.name for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
        close = [("try", str(script.with_name(name))) for name in difflib.get_close_matches(script.name, nearby, 1)]
        raise UsageError(explain(f"there is no script {argv[0]!r} in {os.getcwd()}.", close))


def _nodes(args: argparse.Namespace) -> Nodes:
    if args.nnodes < 1:
        raise UsageError(f"--nnodes {args.nnodes}: a job needs at least 1 machine.")
    if args.nnodes == 1:
        return Nodes()
    missing = [o for o, v in (("--node-rank", args.node_rank), ("--master-addr", args.master_addr)) if v is None]
    if missing:
        raise UsageError(
            explain(
                f"--nnodes {args.nnodes} needs {' and '.join(missing)}.",
                [("try", f"--nnodes {args.nnodes} --node-rank 0 --master-addr ADDRESS_OF_MACHINE_0 on machine 0")],
            )
        )
    if not 0 <= args.node_rank < args.nnodes:
        raise UsageError(f"--node-rank {args.node_rank}: with --nnodes {args.nnodes} it is 0 to {args.nnodes - 1}.")
    try:
        socket.getaddrinfo(args.master_addr, args.master_port)
    except OSError as error:
        raise UsageError(
            f"--master-addr {args.master_addr}: this machine does not know it ({error.strerror})."
        ) from error
    return Nodes(args.nnodes, args.node_rank, args.master_addr, args.master_port)


def _config(nproc: int, nodes: Nodes, folder: str) -> LaunchConfig:
    where: dict[str, Any]
    if nodes.count == 1:
        where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
        job = str(uuid.uuid4())
    else:
        where = {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{nodes.host}:{nodes.port}",
            "rdzv_configs": {"rank": nodes.rank},
        }
        job = "colonnade"  # the same on all machines
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=nproc,
        run_id=job,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **where,
    )


@contextlib.contextmanager
def _surroundings(nproc: int) -> Iterator[None]:
    """What torchrun reads and changes in this process: set for it, and put back."""
    environment = {
        "OMP_NUM_THREADS": str(max(1, available_processors() // nproc)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_S),
    }
    added = [name for name in environment if name not in os.environ]
    signals = {number: signal.getsignal(number) for number in _SIGNALS}
    silenced = logging.root.manager.disable
    os.environ.update({name: environment[name] for name in added})
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # its lines about each process: the page says it once
    try:
        yield
    finally:
        logging.disable(silenced)
        for name in added:
            del os.environ[name]
        for number, handler in signals.items():
            signal.signal(number, handler)


def _end_process_groups(failures: dict[int, ProcessFailure]) -> None:
    """End what the processes have started themselves and left behind; each leads a process group of its own."""
    for failure in failures.values():
        with contextlib.suppress(ProcessLookupError):  # the usual case: nothing is left
            os.killpg(failure.pid, signal.SIGKILL)


def _culprit(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Rank and failure that came before all others."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        failure = item[1]
        recorded = _recorded(failure)
        if recorded is None:  # SIGTERM is how the launcher ends the others
            return (2 if failure.exitcode == -signal.SIGTERM else 0), failure.timestamp
        return (1 if recorded.consequence else 0), failure.timestamp

    return min(failures.items(), key=order)


@dataclass(frozen=True)
class _Record:
    """What a process wrote about its own end: see `FailureGuard`."""

    message: str
    consequence: bool
    cause_rank: int | None


def _recorded(failure: ProcessFailure) -> _Record | None:
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo", {})
    return _Record(str(message.get("message")), bool(extra.get("consequence")), extra.get("cause_rank"))


def _page(failures: dict[int, ProcessFailure], world_size: int, seconds: float) -> str:
    rank, first = _culprit(failures)
    others = sorted(set(failures) - {rank})
    record = _recorded(first)
    rows = [("how", _how(first))]
    if (
        record is not None and record.cause_rank is not None and record.cause_rank not in failures
    ):  # it failed on another machine
        others, rank = sorted(failures), record.cause_rank
        rows = [("error", record.message), ("where", f"the output on the machine of rank {rank}")]
    elif record is not None:
        rows += [("error", record.message), ("where", f"above, at “rank {rank} of {world_size} failed”")]
    if others:
        rows.append(("others", f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} ended with it"))
    head = f"\ncolonnade run: rank {rank} of {world_size} failed after {seconds:.1f} s, and the job was ended."
    return explain(head, rows)


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        name = failure.signal_name()
        return f"process {failure.pid} was ended by {name}" + (f" ({_HINTS[name]})" if name in _HINTS else "")
    how = f"process {failure.pid} ended with exit code {failure.exitcode}"
    if _recorded(failure) is None:
        how += " and left no message: either its traceback is above, or it called sys.exit() or os._exit()"
    return how


def _exit_code(code: int) -> int:
    return code if code > 0 else 128 - code
