"""Rows that people really put, the strict comparison, and random rows: shared by every test of payload."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

from relax_tq_rdma.payload.dtypes import NUMPY_DTYPES, NUMPY_SCALARS, TORCH_KINDS

EXAMPLES = int(os.environ.get("RTQ_TEST_EXAMPLES", "200"))
"""Hypothesis examples per property; a release run sets 20000."""


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's logical value as exact bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Whether two values agree in kind, dtype, shape and bytes."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.is_nested != b.is_nested:
            return False
        if a.is_nested:
            x, y = a.unbind(), b.unbind()
            return len(x) == len(y) and all(map(same, x, y))
        return tuple(a.shape) == tuple(b.shape) and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        if not isinstance(b, np.ndarray) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(map(same, a.ravel(), b.ravel()))
        return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    if isinstance(a, Image.Image):
        same_frame = isinstance(b, Image.Image) and (a.mode, a.size) == (b.mode, b.size)
        return same_frame and a.tobytes() == b.tobytes() and a.getpalette() == b.getpalette()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and a != a:
        return isinstance(b, float) and b != b
    return type(a) is type(b) and bool(a == b)


def strict(a: Any, b: Any) -> bool:
    """``same``, and what ``==`` forgets: types of keys, the sign of zero, the bits of a NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(a) == list(b) and list(map(type, a)) == list(map(type, b))
        return keys and all(strict(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(strict, a, b))
    if isinstance(a, (float, np.generic)):
        return type(a) is type(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return same(a, b)


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits: NaNs, infinities and negative zeros included; booleans stay 0 and 1."""
    count = math.prod(shape)
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 2 if dtype is torch.bool else 256, count * dtype.itemsize, np.uint8)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _video() -> dict[Any, Any]:
    frame = bits(torch.uint8, (3, 8, 8))
    return {"frames": [[frame, frame.flip(0)], [frame]], "second_per_grid_ts": [0.5, 1.0], "fps": None, "none": []}


def _deep() -> dict[Any, Any]:
    value: Any = {"t": torch.arange(3), 7: (1, 2.5, "x"), True: None}
    for _ in range(6):
        value = [{"in": value, "beside": [torch.zeros(2, 0), np.int16(3)]}]
    return {"deep": value}


def _shared() -> dict[Any, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {"a": base, "b": base, "row": base[1], "column": base[:, 2], "both": [base, base.t()]}


FITS: dict[str, Callable[[], dict[Any, Any] | None]] = {
    "none": lambda: None,
    "empty": dict,
    "none value": lambda: {"pixel_values": None},
    "text": lambda: {"text": "日本\x00\n", "ids": [1, 2, 3], "score": 0.5, "ok": True, "blob": b"\x00\xff"},
    "image": lambda: {"pixel_values": bits(torch.float32, (16, 12)), "image_grid_thw": torch.tensor([[1, 4, 4]])},
    "bf16 image": lambda: {"pixel_values": bits(torch.bfloat16, (16, 12)), "image_grid_thw": torch.tensor([[1, 4, 4]])},
    "fp32 beside bf16": lambda: {"a": bits(torch.float32, (5,)), "b": bits(torch.bfloat16, (5,))},
    "video": _video,
    "deep": _deep,
    "shared storage": _shared,
    "zero dimensions": lambda: {"flag": torch.tensor(True), "one": torch.tensor([3]), "x": torch.tensor(1.5)},
    "zero sizes": lambda: {"a": torch.empty(0), "b": torch.empty(3, 0, 2, dtype=torch.int64), "c": torch.ones(1)},
    "transposed": lambda: {"x": torch.arange(6.0).reshape(2, 3).t()},
    "strided": lambda: {"x": torch.arange(10.0)[::3], "y": bits(torch.bfloat16, (8, 8))[1::3, ::2]},
    "expanded": lambda: {"x": torch.tensor([[1.0], [2.0]]).expand(2, 5), "y": torch.tensor(7).expand(3, 4)},
    "sliced": lambda: {"x": torch.zeros(2048, 512)[:1]},
    "channels last": lambda: {"x": bits(torch.float16, (2, 3, 4, 5)).contiguous(memory_format=torch.channels_last)},
    "requires grad": lambda: {"leaf": torch.ones(3, requires_grad=True), "node": torch.ones(3, requires_grad=True) * 2},
    "parameter": lambda: {"w": torch.nn.Parameter(torch.ones(2, 2))},
    "lazy conj": lambda: {"x": bits(torch.complex64, (3, 4)).conj()},
    "lazy neg": lambda: {"x": torch.arange(4).to(torch.complex64).conj().imag},
    "rank six": lambda: {"x": torch.arange(64).reshape(2, 2, 2, 2, 2, 2)},
    "arrays": lambda: {
        "a": np.arange(6)[::-1],
        "b": np.arange(6, dtype=">i4"),
        "c": np.array(3.5),
        "d": np.ones((2, 0)),
    },
    "array order": lambda: {
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "ro": np.frombuffer(b"abcd", np.uint8),
    },
    "numpy scalars": lambda: {"f": np.float32(1.5), "d": np.float64(-0.0), "i": np.int64(3), "b": np.bool_(True)},
    "scalars": lambda: {"i": 1, "b": True, "f": 1.0, "min": -(2**63), "max": 2**64 - 1, "nan": math.nan, "z": -0.0},
    "odd keys": lambda: {"a@b/c.d:c0": 1, "": 2, "ключ": torch.ones(1), 3: 4, False: 5, None: 6, -7: [8]},
    "tuples": lambda: {"t": (), "u": (1, [2, (3,)]), "v": ((torch.ones(1), "x"), None), "w": [()]},
    "long string": lambda: {"s": "x" * 5_000_000},
}
"""Rows that the format holds, each built anew."""

FITS |= {f"dtype {name}": lambda k=kind: {"x": bits(k.dtype, (3, 5))} for name, kind in TORCH_KINDS.items()}
FITS |= {f"dtype {n} strided": lambda k=k: {"x": bits(k.dtype, (8, 9)).t()[1::2]} for n, k in TORCH_KINDS.items()}
FITS |= {f"array {name}": lambda d=dtype: {"x": np.ones((2, 3), d)} for name, dtype in NUMPY_DTYPES.items()}


def _cycle() -> dict[Any, Any]:
    row: dict[Any, Any] = {"x": torch.ones(1)}
    row["self"] = row
    return row


def _wide_cycle() -> dict[Any, Any]:
    inner: list[Any] = []
    inner.extend([inner, inner])
    return {"x": inner}


def _bomb() -> dict[Any, Any]:
    value: list[Any] = [torch.ones(1)]
    for _ in range(50):
        value = [value, value]
    return {"x": value}


def _freed() -> dict[Any, Any]:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return {"x": tensor}


@dataclasses.dataclass
class _Record:
    value: int = 1


class _Text(str):
    pass


def _quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


STAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "not a dict": (lambda: [torch.ones(1)], "the row is a list"),
    "bare tensor": (lambda: torch.ones(1), "the row is a torch.Tensor"),
    "ordered dict": (lambda: collections.OrderedDict(a=1), "the row is a collections.OrderedDict"),
    "ordered dict inside": (lambda: {"x": [collections.OrderedDict(a=1)]}, "'x': a value of type collections.Ord"),
    "default dict": (lambda: {"x": collections.defaultdict(list)}, "'x': a value of type collections.defaultdict"),
    "named tuple": (lambda: {"x": torch.Size([1, 2])}, "'x': a value of type torch.Size"),
    "str subclass": (lambda: {"x": _Text("a")}, "_Text"),
    "sparse": (lambda: {"x": torch.eye(2).to_sparse()}, "'x': sparse_coo tensor"),
    "sparse csr": (lambda: {"x": torch.eye(2).to_sparse_csr()}, "'x': sparse_csr tensor"),
    "meta": (lambda: {"x": [torch.empty(2, device="meta")]}, "'x': meta tensor"),
    "quantised": (lambda: {"x": _quantised()}, "'x': quantised tensor of dtype torch.quint8"),
    "nested": (lambda: {"x": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, "'x': nested tensor"),
    "jagged": (
        lambda: {"x": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)},
        "'x': jagged tensor",
    ),
    "subclass": (lambda: {"x": torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {}))}, "subclass"),
    "freed": (_freed, "'x': a tensor whose storage was freed"),
    "bits": (lambda: {"x": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}, "'x': tensor of dtype torch.bits8"),
    "cycle": (_cycle, "'self': nested deeper than 64 levels, or it contains itself"),
    "wide cycle": (_wide_cycle, "'x': nested deeper than 64 levels, or it contains itself"),
    "bomb": (_bomb, "'x': more than 65536 nested values"),
    "object array": (lambda: {"x": np.array([{"k": 1}, None], dtype=object)}, "'x': numpy array of dtype object"),
    "string array": (lambda: {"x": np.array(["x", "yy"])}, "'x': numpy array of dtype <U2"),
    "dates": (lambda: {"x": np.array(["2020-01-01"], "M8[D]")}, "'x': numpy array of dtype datetime64[D]"),
    "records": (lambda: {"x": np.zeros(2, [("a", "i4"), ("b", "f8")])}, "'x': numpy array of dtype [("),
    "longdouble": (lambda: {"x": np.ones(2, np.longdouble)}, "'x': numpy array of dtype float128"),
    "dtype metadata": (lambda: {"x": np.ones(2, np.dtype("f4", metadata={"a": 1}))}, "with metadata"),
    "masked array": (lambda: {"x": np.ma.masked_array([1], [True])}, "'x': numpy subclass numpy.ma.MaskedArray"),
    "twin scalar": (lambda: {"x": np.longlong(3)}, "'x': a value of type numpy.longlong"),
    "date scalar": (lambda: {"x": np.datetime64("2020-01-01")}, "'x': a value of type numpy.datetime64"),
    "big int": (lambda: {"a": 1, "x": [2**64]}, "'x': a value that msgpack cannot hold"),
    "surrogate": (lambda: {"a": 1, "x": "\ud800"}, "'x': a value that msgpack cannot hold"),
    "surrogate key": (lambda: {"\ud800": 1}, "'\\ud800': a value that msgpack cannot hold"),
    "bytes key": (lambda: {b"x": 1}, "a key of type bytes"),
    "tuple key inside": (lambda: {"x": {(1, 2): 3}}, "'x': a dict with keys that are not"),
    "complex": (lambda: {"x": 1j}, "'x': a value of type complex"),
    "bytearray": (lambda: {"x": bytearray(b"a")}, "'x': a value of type bytearray"),
    "set": (lambda: {"x": {1}}, "'x': a value of type set"),
    "dataclass": (lambda: {"x": _Record()}, "'x': a value of type tests.payload_cases._Record"),
    "picture": (lambda: {"x": Image.new("P", (2, 2))}, "'x': a value of type PIL.Image.Image"),
    "huge header": (lambda: {"x": bytes(65 << 20)}, "non-tensor values of"),
}
"""Rows that must come back as the object they are, each with a part of the reason."""


# --- random rows ----------------------------------------------------------------------------------------------------

_KINDS = sorted(TORCH_KINDS)
_SCALARS = sorted(set(NUMPY_SCALARS.values()))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, rank 0 to 4, zero sizes, and views: transposed, strided, expanded, conjugated, with gradient."""
    dtype = TORCH_KINDS[draw(st.sampled_from(_KINDS))].dtype
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = bits(dtype, shape, draw(st.integers(0, 2**32 - 1)))
    view = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "conj", "grad", "offset"]))
    if view == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, -1)
    if view == "strided" and tensor.dim():
        return tensor[:: draw(st.integers(1, 3))]
    if view == "expanded":
        return tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *shape)
    if view == "conj" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    if view == "grad" and dtype in (torch.float32, torch.float64, torch.bfloat16):
        return tensor.clone().requires_grad_()
    if view == "offset" and tensor.dim() and shape[0] > 1:
        return tensor[1:]
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Numeric arrays of both byte orders, reversed and Fortran-ordered ones too."""
    dtype = NUMPY_DTYPES[draw(st.sampled_from(sorted(NUMPY_DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = 2 if dtype.kind == "b" else 256
    array = rng.integers(0, top, math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)
    view = draw(st.sampled_from(["plain", "reversed", "fortran", "read-only"]))
    if view == "reversed" and array.ndim:
        return array[::-1]
    if view == "fortran":
        return np.asfortranarray(array)
    array.setflags(write=view != "read-only")
    return array


def _numpy_scalars() -> st.SearchStrategy[Any]:
    def build(code: str, seed: int) -> Any:
        dtype = np.dtype(code)
        top = 2 if dtype.kind == "b" else 256
        return np.random.default_rng(seed).integers(0, top, dtype.itemsize, np.uint8).view(dtype)[0]

    return st.builds(build, st.sampled_from(_SCALARS), st.integers(0, 2**32 - 1))


def leaves() -> st.SearchStrategy[Any]:
    """Plain values, a few of which msgpack cannot hold (big ints, surrogates)."""
    text = st.text(st.characters(exclude_categories=()), max_size=6)
    return st.one_of(
        *(st.none(), st.booleans(), st.integers(-(2**65), 2**65), st.floats(), text, st.binary(max_size=8)),
        *(_numpy_scalars(), tensors(), arrays()),
    )


_KEYS = st.one_of(st.text(max_size=6), st.integers(-(2**40), 2**40), st.booleans(), st.none())


def values() -> st.SearchStrategy[Any]:
    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=4)
        return st.one_of(lists, lists.map(tuple), st.dictionaries(_KEYS, inner, max_size=4))

    return st.recursive(leaves(), grow, max_leaves=8)


def rows() -> st.SearchStrategy[dict[Any, Any] | None]:
    """Random rows: dicts of anything above, and None."""
    return st.one_of(st.none(), st.dictionaries(_KEYS, values(), max_size=5))
