"""oneDNN's own memory descriptors and reorders through its C API: the oracle for the format tests.

Uses the libdnnl.so.3 that the extension has loaded and reads enum values from the headers beside
it, so a newer oneDNN brings its own tags. No code of this project takes part in the answers.
"""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

MAX_NDIMS = 12
SUCCESS = 0
_DIMS = ctypes.c_int64 * MAX_NDIMS


@cache
def _prefix() -> Path:
    """Where oneDNN is installed: the library in this process, else that of the environment."""
    maps = Path("/proc/self/maps")
    loaded = re.search(r"(/\S*)/lib\w*/libdnnl\.so", maps.read_text() if maps.exists() else "")
    return Path(loaded[1]) if loaded else Path(sys.prefix)


@dataclass(frozen=True)
class OracleError(Exception):
    """oneDNN refused: status 2 is invalid_arguments, 3 unimplemented."""

    status: int


@cache
def _header() -> str:
    folder = _prefix() / "include" / "oneapi" / "dnnl"
    names = ("dnnl_common_types.h", "dnnl_types.h")
    return "\n".join((folder / name).read_text() for name in names if (folder / name).exists())


@cache
def enum(type_name: str) -> dict[str, int]:
    """Enumerators of a oneDNN enum type, without the `dnnl_` prefix -> value."""
    pattern = r"typedef enum \{((?:(?!typedef enum).)*?)\} " + type_name + ";"
    body = re.search(pattern, _header(), re.S)[1]
    # Experimental enumerators are not in the library; comments name enumerators too.
    code = re.sub(r"//.*", "", re.sub(r"#ifdef.*?#endif", "", body, flags=re.S))
    values: dict[str, int] = {}
    following = 0
    for name, value in re.findall(r"dnnl_(\w+)\s*(?:=\s*([\w]+))?\s*(?:,|$)", code.strip()):
        if value:
            known = values.get(value.removeprefix("dnnl_"))
            following = known if known is not None else int(value.rstrip("uU"), 0)
        values[name] = following
        following += 1
    return values


@cache
def tags() -> dict[str, int]:
    """Every format tag in the header that describes memory: name -> enum value."""
    skipped = ("format_tag_undef", "format_tag_any", "format_tag_last")
    return {n: v for n, v in enum("dnnl_format_tag_t").items() if n not in skipped}


@cache
def aliases() -> dict[str, str]:
    """Domain-specific tag name -> domain-agnostic tag name."""
    # No domain has a letter 'a', and every agnostic name has one.
    agnostic = {v: n for n, v in tags().items() if "a" in n.lower()}
    return {n: agnostic[v] for n, v in tags().items() if n != agnostic[v]}


@cache
def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(_prefix() / "lib" / "libdnnl.so.3"))
    lib.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
    return lib


class _ExecArg(ctypes.Structure):
    """`dnnl_exec_arg_t`."""

    _fields_ = (("arg", ctypes.c_int), ("memory", ctypes.c_void_p))


def _dims(values) -> ctypes.Array:
    return _DIMS(*values)


class OracleDescriptor:
    """A `dnnl_memory_desc_t` with the queries as attributes."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle

    def __del__(self) -> None:
        _library().dnnl_memory_desc_destroy(self._handle)

    @classmethod
    def _create(cls, function: str, *args) -> OracleDescriptor:
        handle = ctypes.c_void_p()
        status = getattr(_library(), function)(ctypes.byref(handle), *args)
        if status != SUCCESS:
            raise OracleError(status)
        return cls(handle)

    @classmethod
    def with_tag(cls, dims, data_type: str, tag: str) -> OracleDescriptor:
        value = enum("dnnl_format_tag_t").get(f"format_tag_{tag}", tags().get(tag))
        return cls._create(
            "dnnl_memory_desc_create_with_tag",
            len(dims),
            _dims(dims),
            enum("dnnl_data_type_t")[data_type],
            value,
        )

    @classmethod
    def with_string_tag(cls, dims, data_type: str, tag: str) -> OracleDescriptor:
        """Any agnostic tag, also one without an enumerator (the entry point benchdnn uses)."""
        return cls._create(
            "dnnl_memory_desc_create_with_string_tag",
            len(dims),
            _dims(dims),
            enum("dnnl_data_type_t")[data_type],
            tag.encode(),
        )

    @classmethod
    def with_strides(cls, dims, data_type: str, strides) -> OracleDescriptor:
        return cls._create(
            "dnnl_memory_desc_create_with_strides",
            len(dims),
            _dims(dims),
            enum("dnnl_data_type_t")[data_type],
            _dims(strides),
        )

    def submemory_desc(self, dims, offsets) -> OracleDescriptor:
        return self._create(
            "dnnl_memory_desc_create_submemory", self._handle, _dims(dims), _dims(offsets)
        )

    def reshape(self, dims) -> OracleDescriptor:
        return self._create("dnnl_memory_desc_reshape", self._handle, len(dims), _dims(dims))

    def permute_axes(self, permutation) -> OracleDescriptor:
        return self._create(
            "dnnl_memory_desc_permute_axes", self._handle, (ctypes.c_int * MAX_NDIMS)(*permutation)
        )

    def __eq__(self, other: object) -> bool:
        return bool(_library().dnnl_memory_desc_equal(self._handle, other._handle))

    __hash__ = None

    def _query(self, what: str, result) -> None:
        value = enum("dnnl_query_t")[f"query_{what}"]
        status = _library().dnnl_memory_desc_query(self._handle, value, ctypes.byref(result))
        if status != SUCCESS:
            raise OracleError(status)

    def _scalar(self, what: str, kind) -> int:
        result = kind()
        self._query(what, result)
        return result.value

    def _vector(self, what: str, length: int) -> tuple[int, ...]:
        result = ctypes.POINTER(ctypes.c_int64)()
        self._query(what, result)
        return tuple(result[:length])

    @property
    def ndims(self) -> int:
        return self._scalar("ndims_s32", ctypes.c_int32)

    @property
    def data_type(self) -> int:
        return self._scalar("data_type", ctypes.c_int)

    @property
    def format_kind(self) -> int:
        return self._scalar("format_kind", ctypes.c_int)

    @property
    def submemory_offset(self) -> int:
        return self._scalar("submemory_offset_s64", ctypes.c_int64)

    @property
    def inner_nblks(self) -> int:
        return self._scalar("inner_nblks_s32", ctypes.c_int32)

    @property
    def dims(self) -> tuple[int, ...]:
        return self._vector("dims", self.ndims)

    @property
    def padded_dims(self) -> tuple[int, ...]:
        return self._vector("padded_dims", self.ndims)

    @property
    def padded_offsets(self) -> tuple[int, ...]:
        return self._vector("padded_offsets", self.ndims)

    @property
    def strides(self) -> tuple[int, ...]:
        return self._vector("strides", self.ndims)

    @property
    def inner_blks(self) -> tuple[int, ...]:
        return self._vector("inner_blks", self.inner_nblks)

    @property
    def inner_idxs(self) -> tuple[int, ...]:
        return self._vector("inner_idxs", self.inner_nblks)

    @property
    def size(self) -> int:
        return _library().dnnl_memory_desc_get_size(self._handle)


def reorder(
    source: np.ndarray, source_desc: OracleDescriptor, desc: OracleDescriptor
) -> np.ndarray:
    """The physical buffer of `desc` after oneDNN reorders the flat buffer `source` into it."""
    lib = _library()
    result = np.full(desc.size // source.itemsize, -1, source.dtype)
    engine, stream, primitive_desc, primitive = (ctypes.c_void_p() for _ in range(4))
    memories = [ctypes.c_void_p(), ctypes.c_void_p()]

    def check(status: int) -> None:
        if status != SUCCESS:
            raise OracleError(status)

    check(lib.dnnl_engine_create(ctypes.byref(engine), 1, ctypes.c_size_t(0)))
    check(lib.dnnl_stream_create(ctypes.byref(stream), engine, 1))
    for memory, md, data in zip(memories, (source_desc, desc), (source, result), strict=True):
        check(
            lib.dnnl_memory_create(
                ctypes.byref(memory), md._handle, engine, ctypes.c_void_p(data.ctypes.data)
            )
        )
    check(
        lib.dnnl_reorder_primitive_desc_create(
            ctypes.byref(primitive_desc), source_desc._handle, engine, desc._handle, engine, None
        )
    )
    check(lib.dnnl_primitive_create(ctypes.byref(primitive), primitive_desc))
    arguments = (_ExecArg * 2)(_ExecArg(1, memories[0]), _ExecArg(17, memories[1]))
    check(lib.dnnl_primitive_execute(primitive, stream, 2, arguments))
    check(lib.dnnl_stream_wait(stream))
    for memory in memories:
        lib.dnnl_memory_destroy(memory)
    lib.dnnl_primitive_destroy(primitive)
    lib.dnnl_primitive_desc_destroy(primitive_desc)
    lib.dnnl_stream_destroy(stream)
    lib.dnnl_engine_destroy(engine)
    return result
