import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from colonnade.errors import UsageError
from colonnade.testing.ranks import RankFailure, on_ranks, run_on_ranks


def rank_and_world(scale, offset=0):
    return dist.get_rank() * scale + offset, dist.get_world_size()


def sum_of_ranks():
    value = torch.tensor([float(dist.get_rank())], requires_grad=True) * 1
    dist.all_reduce(value.detach())
    return value


def random_then_change_defaults():
    value = torch.rand(3)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return value


def pid():
    return os.getpid()


def raise_on_rank_1_while_others_wait():
    if dist.get_rank() == 1:
        print("about to fail")
        raise ValueError("boom-17")
    dist.barrier()


def raise_everywhere_rank_2_first():
    if dist.get_rank() == 2:
        raise ValueError("the first")
    try:
        dist.barrier()
    except RuntimeError as error:
        raise RuntimeError("a consequence") from error


def leave_on_rank_0(how):
    if dist.get_rank() == 0:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_rank_0():
    if dist.get_rank() == 0:
        while True:
            time.sleep(0.01)


def wait_for_a_peer_that_returned():
    if dist.get_rank() == 0:
        dist.barrier()


def return_a_lambda():
    return lambda: None


def say_hello():
    print(f"hello from {dist.get_rank()}")


def test_results_come_in_the_order_of_the_ranks():
    assert run_on_ranks(2, rank_and_world, 10, offset=1) == [(1, 2), (11, 2)]
    assert run_on_ranks(3, rank_and_world, 10) == [(0, 3), (10, 3), (20, 3)]


def test_one_rank_is_a_world_too():
    assert run_on_ranks(1, rank_and_world, 10) == [(0, 1)]


def test_tensors_are_returned_by_value():
    for value in run_on_ranks(2, sum_of_ranks):
        assert value.equal(torch.tensor([1.0]))
        assert not value.is_shared()


def test_each_call_starts_from_the_same_state():
    first = run_on_ranks(2, random_then_change_defaults)
    second = run_on_ranks(2, random_then_change_defaults)
    torch.manual_seed(0)
    for value in first + second:
        assert value.dtype is torch.float32
        assert value.equal(first[0])
    assert first[0].equal(torch.rand(3))


def test_ranks_stay_alive_between_calls():
    assert run_on_ranks(2, pid) == run_on_ranks(2, pid)


def test_what_ranks_print_is_printed(capsys):
    run_on_ranks(2, say_hello)
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_a_failure_shows_its_traceback_and_where_the_others_were():
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(3, raise_on_rank_1_while_others_wait)
    text = str(caught.value)
    assert text.startswith("test_ranks.raise_on_rank_1_while_others_wait failed on rank 1 of 3.")
    assert text.index("─── rank 1 ───") < text.index("─── rank 0 ───")
    assert "ValueError: boom-17" in caught.value.reports[1]
    assert "about to fail" in text
    for rank in (0, 2):
        assert "still running 2 s after rank 1 failed" in caught.value.reports[rank]
        assert "in raise_on_rank_1_while_others_wait" in caught.value.reports[rank]
    assert run_on_ranks(3, rank_and_world, 1) == [(0, 3), (1, 3), (2, 3)]


def test_the_first_to_fail_comes_first():
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(3, raise_everywhere_rank_2_first)
    assert next(iter(caught.value.reports)) == 2
    assert "the first" in caught.value.reports[2]


@pytest.mark.parametrize("how, said", [("exit", "exit code 3"), ("kill", "signal 9 (SIGKILL)")])
def test_a_dead_process_is_named_with_how_it_ended(how, said):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, leave_on_rank_0, how)
    assert said in caught.value.reports[0]
    assert "failed on rank 0 of 2" in str(caught.value)
    assert time.monotonic() - start < 10
    assert run_on_ranks(2, rank_and_world, 1) == [(0, 2), (1, 2)]


def test_a_hang_ends_at_the_time_out_with_stacks():
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, hang_on_rank_0, timeout_s=1)
    assert time.monotonic() - start < 10
    assert "did not return within 1 s on rank 0 of 2" in str(caught.value)
    assert "rank 1 returned" in str(caught.value)
    assert "in hang_on_rank_0" in caught.value.reports[0]
    assert "watch_parent" not in caught.value.reports[0]


def test_a_hang_in_a_collective_shows_the_collective():
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, wait_for_a_peer_that_returned, timeout_s=1)
    assert "in barrier" in caught.value.reports[0]
    assert "in wait_for_a_peer_that_returned" in caught.value.reports[0]


def test_a_result_that_cannot_be_sent_is_a_failure_of_that_rank():
    with pytest.raises(RankFailure, match="(?s)return_a_lambda failed.*pickle"):
        run_on_ranks(2, return_a_lambda)


def test_a_function_that_cannot_be_sent_is_refused():
    with pytest.raises(UsageError, match="top of a module"):
        run_on_ranks(2, lambda: None)


@on_ranks(2)
def test_a_decorated_test_runs_on_every_rank():
    assert dist.get_world_size() == 2
    with pytest.raises(UsageError, match="inside a rank"):
        run_on_ranks(2, pid)


@pytest.mark.parametrize("scale", [1, 2])
@on_ranks(2)
def test_a_decorated_test_takes_parameters(scale, tmp_path):
    assert scale in (1, 2)
    assert tmp_path.is_dir()


@on_ranks(2)
def fails_in_the_body():
    assert dist.get_rank() == 0


def test_a_decorated_test_fails_where_one_rank_fails():
    with pytest.raises(RankFailure, match="fails_in_the_body failed on rank 1 of 2"):
        fails_in_the_body()


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from colonnade.testing import ranks\n"
        "ranks.PRELOADED = 'torch'  # starts sooner than with transformers\n"
        "if __name__ == '__main__':\n"
        "    print(*ranks.run_on_ranks(2, os.getpid), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=100)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{number}") for number in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.05)
