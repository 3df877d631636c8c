"""Files of tensors: any safetensors reader reads them, any box is read to any memory, and damage is named."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from colonnade.checkpoint import tensor_file
from colonnade.checkpoint.file_sum import check_sum, checksum
from colonnade.checkpoint.tensor_file import TensorFile, write_tensors
from colonnade.checkpoint.tensor_header import DTYPES
from colonnade.errors import CheckpointError


def some_tensor(dtype, shape):
    bits = torch.randint(0, 2, (*shape, dtype.itemsize * 8), generator=torch.Generator().manual_seed(0))
    if dtype == torch.bool:
        return bits[..., 0].bool()
    packed = (bits.view(*shape, dtype.itemsize, 8) * torch.tensor([1 << n for n in range(8)])).sum(-1).to(torch.uint8)
    return packed.view(dtype).view(shape)


def same_bits(a, b):
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*raw)


def test_every_format_and_shape_is_read_by_safetensors_and_here(tmp_path):
    shapes = [(), (0, 3), (1,), (5,), (3, 4), (2, 3, 4)]
    tensors = {f"{kind} {shape}": some_tensor(dtype, shape) for kind, dtype in DTYPES.items() for shape in shapes}
    tensors |= {
        "columns": torch.randn(6, 8)[:, 2:5],
        "transposed": torch.randn(4, 3).T,
        "expanded": torch.ones(1).expand(7),
    }
    made = write_tensors(tensors, tmp_path / "file.safetensors")
    assert (
        made == checksum(tmp_path / "file.safetensors")
        and made.nbytes == (tmp_path / "file.safetensors").stat().st_size
    )
    with safe_open(tmp_path / "file.safetensors", "pt") as theirs, TensorFile(tmp_path / "file.safetensors") as ours:
        assert set(theirs.keys()) == set(tensors) == set(ours.entries) and theirs.metadata() == {"format": "pt"}
        for key, tensor in tensors.items():
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            ours.read(key, (0,) * tensor.dim(), target)
            assert same_bits(target, tensor) and same_bits(theirs.get_tensor(key), tensor), key


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_box_is_read_to_any_memory(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("boxes")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    box = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    whole = torch.randn(shape)
    write_tensors({"w": whole, "other": torch.ones(3)}, folder / "file")
    wanted = whole[tuple(slice(a, b) for a, b in box)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    big = torch.full([2 * n + 3 for n in wanted.shape], 7.0, dtype=dtype)
    step = data.draw(st.integers(1, 2))
    target = big[tuple(slice(1, 1 + step * n, step) for n in wanted.shape)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BLOCK", data.draw(st.sampled_from([16, 64, 1 << 20])))
        with TensorFile(folder / "file") as opened:
            opened.read("w", [a for a, _ in box], target)
    assert torch.equal(target, wanted.to(dtype))
    target.fill_(7.0)
    assert (big == 7).all()  # nothing beside it has been written


def test_what_is_one_run_of_bytes_is_read_alone(tmp_path):
    write_tensors({"w": torch.arange(40.0).view(10, 4)}, tmp_path / "file.safetensors")
    with TensorFile(tmp_path / "file.safetensors") as opened:
        opened.read("w", (3, 0), torch.empty(5, 4))
        assert opened.bytes_read == 5 * 4 * 4
        opened.read("w", (3, 1), torch.empty(1, 2))
        assert opened.bytes_read == 5 * 4 * 4 + 2 * 4


def test_any_flipped_byte_and_any_missing_one_is_found(tmp_path):
    file = tmp_path / "file.safetensors"
    made = write_tensors({"w": torch.randn(7, 3), "n": torch.arange(5)}, file)
    check_sum(file, made, thorough=True)
    good = file.read_bytes()
    for place in range(len(good)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match="file.safetensors is damaged"):
            check_sum(file, made, thorough=True)
    for length in (0, 5, 8, 50, len(good) - 1):
        file.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="file.safetensors is damaged"):
            check_sum(file, made, thorough=False)
        with pytest.raises(CheckpointError, match="file.safetensors cannot be read"):
            TensorFile(file)
    os.remove(file)
    with pytest.raises(CheckpointError, match="file.safetensors cannot be read"):
        TensorFile(file)


def test_a_format_without_a_word_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="w is of format torch.complex128"):
        write_tensors({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "file.safetensors")
