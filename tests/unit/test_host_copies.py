"""Host copies for background saves equal the saved values, in one buffer, also if the values change later."""

from __future__ import annotations

import torch

from fsdp_c.checkpoint.host_copies import HostCopies
from fsdp_c.checkpoint.values import RangeTensor

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


def test_host_copies_equal_the_values_of_any_dtype_and_layout() -> None:
    base = torch.randn(6, 8)
    together, halves = torch.randn(1000), torch.randn(20)
    flat = {
        **{str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
        "transposed": torch.randn(3, 5).t(),
        "every other": base[::2, 1:7],
        "mostly left out": torch.randn(100)[::10],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "one number": torch.tensor(3.0),
        "nothing": torch.empty(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        **{f"part {i}": together[i : i + 10] for i in range(0, 1000, 100)},
        "range": RangeTensor(together[5:17], (3, 4), 0),
        "first half": halves[:11],
        "second half": halves[9:],
        "range of a half": RangeTensor(halves[3:15], (3, 4), 0),
        "text": "as it is",
        "list": [1, 2],
    }
    expected = {key: value.clone() for key, value in flat.items() if isinstance(value, torch.Tensor)}
    host = HostCopies()
    copies = host.start(flat, {key: (key,) for key in flat}, [], optim_key=None)
    for value in flat.values():
        if isinstance(value, RangeTensor):
            value.local.zero_()
        elif isinstance(value, torch.Tensor) and value.numel():
            value.untyped_storage().fill_(0)
    host.wait()
    assert [*copies] == [*flat] and copies["text"] == "as it is"
    for key, value in expected.items():
        if isinstance(value, RangeTensor):
            assert torch.equal(copies[key].local, value.local) and copies[key].shape == (3, 4)
        else:
            assert copies[key].dtype == value.dtype
            assert torch.equal(copies[key].to(torch.complex128), value.to(torch.complex128)), key
