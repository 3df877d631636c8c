"""Joining the job: from a process that was started to a rank with a device, a process group and a seed."""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from colonnade.cluster.device import backend as default_backend
from colonnade.cluster.device import device_type, set_device
from colonnade.cluster.failure import FailureGuard
from colonnade.cluster.seed import seed_all
from colonnade.errors import CommunicationError, ConfigError, UsageError, explain

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Place:
    """Where this process stands in the job, and where the job's store is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int


_guard: FailureGuard | None = None
_launches = 0  # a second launch in one process must not meet the keys of the first in the store


def launch_from_torch(seed: int = 1024, backend: str | None = None, timeout_s: float = 600) -> None:
    """Join the job that `colonnade run` or torchrun started this process for.

    Sets the device, makes the process group of all ranks and seeds Python, NumPy and torch. From then on a rank that
    fails ends the whole job within seconds, with its traceback first. The group is taken down when the script ends.
    Where a process group exists already it is kept, and only the device and the seed are set.

    Args:
        seed: the same on all ranks.
        backend: of the process group; by default nccl on CUDA, xccl on XPU, gloo on the CPU.
        timeout_s: seconds after which a collective that a peer does not join raises an error.

    Raises:
        UsageError: where the environment is not that of torchrun.
        CommunicationError: where the other ranks cannot be reached.
    """
    if dist.is_initialized():
        set_device(_integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else dist.get_rank())
        seed_all(seed)
    else:
        _join(_place_from_environment(), seed, backend, timeout_s)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    seed: int = 1024,
    backend: str | None = None,
    timeout_s: float = 600,
    local_rank: int | None = None,
    local_world_size: int | None = None,
) -> None:
    """Join a job whose processes you start yourself. As `launch_from_torch`, with its environment as arguments.

    Args:
        rank, world_size: this process among all.
        host, port: where rank 0 listens; the same on all ranks.
        seed, backend, timeout_s: as in `launch_from_torch`.
        local_rank, local_world_size: this process among those of its machine; by default all ranks are on one machine.

    Raises:
        UsageError: for numbers that cannot be.
        CommunicationError: where the other ranks cannot be reached.

    Example:
        colonnade.launch(rank=0, world_size=1, host="127.0.0.1", port=29500)     # one process, for example a notebook
    """
    local_rank = rank if local_rank is None else local_rank
    local_world_size = world_size if local_world_size is None else local_world_size
    if dist.is_initialized():
        set_device(local_rank)
        seed_all(seed)
    else:
        _join(_Place(rank, world_size, local_rank, local_world_size, host, port), seed, backend, timeout_s)


def _place_from_environment() -> _Place:
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise UsageError(
            explain(
                "launch_from_torch() has to run in a process that `colonnade run` or torchrun started.",
                [
                    ("missing", f"{', '.join(missing)} in the environment"),
                    ("try", "colonnade run --nproc-per-node 2 script.py"),
                    ("or", 'colonnade.launch(rank=0, world_size=1, host="127.0.0.1", port=29500) for one process'),
                ],
            )
        )
    return _Place(
        rank=_integer("RANK"),
        world_size=_integer("WORLD_SIZE"),
        local_rank=_integer("LOCAL_RANK"),
        local_world_size=_integer("LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE"),
        host=os.environ["MASTER_ADDR"],
        port=_integer("MASTER_PORT"),
    )


def _integer(name: str) -> int:
    value = os.environ[name]
    try:
        return int(value)
    except ValueError as error:
        raise UsageError(f"the environment says {name}={value!r}, which is not a whole number.") from error


def _check(place: _Place, backend: str, timeout_s: float) -> None:
    size, local_size = place.world_size, place.local_world_size
    rules = [
        ("world_size", size, size >= 1, "at least 1"),
        ("rank", place.rank, size < 1 or 0 <= place.rank < size, f"0 ≤ rank < world_size = {size}"),
        (
            "local_rank",
            place.local_rank,
            0 <= place.local_rank < local_size,
            f"0 ≤ local_rank < {local_size}",
        ),
        ("port", place.port, 0 < place.port < 2**16, "a port from 1 to 65535"),
        ("timeout_s", timeout_s, timeout_s > 0, "more than 0 seconds"),
    ]
    problems = [(name, f"is {value}, needs {rule}") for name, value, holds, rule in rules if not holds]
    if problems:
        raise UsageError(explain("this process cannot be given a place in the job.", problems))
    devices = torch.accelerator.device_count()
    if backend in ("nccl", "xccl") and local_size > devices:
        raise ConfigError(
            explain(
                f"{local_size} processes on a machine with {devices} {device_type()} devices.",
                [
                    ("needs", f"a device for each process: {backend} cannot share one"),
                    ("try", f"--nproc-per-node {devices}" if devices else 'backend="gloo"'),
                ],
            )
        )


def _join(place: _Place, seed: int, backend: str | None, timeout_s: float) -> None:
    global _guard
    backend = backend or default_backend()
    _check(place, backend, timeout_s)
    device = set_device(place.local_rank)
    _share_processors(place.local_world_size)
    store_host = None if _agent_hosts_store(place.port) else 0
    previous_hook = sys.excepthook  # init_process_group puts one of its own around it
    store = _connect(place, place.rank == store_host, backend, device, timeout_s)
    if _guard is None:
        atexit.register(_finish)
    else:
        _guard.close()
    _guard = FailureGuard(
        store,
        place.rank,
        place.world_size,
        previous_hook=previous_hook,
        store_host=store_host,
        error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
        launcher_pid=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None,
    )
    seed_all(seed)


def _connect(place: _Place, hosts_store: bool, backend: str, device: torch.device, timeout_s: float) -> dist.Store:
    """Make the process group of all ranks; returns the part of the job's store that belongs to the failure guard."""
    global _launches
    _launches += 1
    timeout = timedelta(seconds=timeout_s)
    try:
        server = dist.TCPStore(
            place.host, place.port, place.world_size, is_master=hosts_store, timeout=timeout, multi_tenant=hosts_store
        )
        # A restarted job may find the store of its first try, with that one's failure in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"colonnade/{attempt}/{_launches}", server)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if backend in ("nccl", "xccl") else None,
        )
    except RuntimeError as error:  # what torch raises where a peer or the store does not answer
        raise CommunicationError(
            f"rank {place.rank} of {place.world_size} could not join the job at {place.host}:{place.port} "
            f"within {timeout_s:g} s: {error}"
        ) from error
    return dist.PrefixStore("failure", store)


def _agent_hosts_store(port: int) -> bool:
    """Whether the launcher serves the store at its port, so that no rank has to."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("MASTER_PORT") == str(port)


def _share_processors(local_world_size: int) -> None:
    """Give each process of this machine its part of the processors; all of them each would slow down every one."""
    if device_type() == "cpu" and local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_processors() // local_world_size))


def available_processors() -> int:
    """Number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finish() -> None:
    """The script has ended: leave the job so that neither this process nor its peers print warnings."""
    if _guard is None or _guard.pid != os.getpid():
        return
    _guard.leave()
    if dist.is_initialized():
        dist.destroy_process_group()
    _guard.serve_until_all_left()
    _guard.close()
