"""The loader of compiled code: it places an ELF object file, as LLVM writes it for x86-64 Linux, in
the memory of this process.

LLVM itself takes a second to import and 100 MiB of memory, which a process that only runs code from
the disk does not need. An object file has sections (machine code, constants, variables), symbols
(names of places in sections, and of functions outside of the file), and relocations (places where
the address of a symbol is to be written). `load_object` copies the sections to new memory, writes
the addresses, and makes the part with code executable and no longer writable.

What the loader does not know it refuses: `load_object` then raises an `UnsupportedObject`, and the
caller compiles with Numba.

Source: Tool Interface Standard, Executable and Linking Format 1.2; System V ABI, AMD64 supplement,
section 4.4.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE, _X86_64 = 1, 62
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8  # types of sections
_WRITABLE, _ALLOCATED, _THREAD_LOCAL = 0x1, 0x2, 0x400  # flags of sections
_UNDEFINED, _RESERVED, _ABSOLUTE, _COMMON = 0, 0xFF00, 0xFFF1, 0xFFF2  # numbers of sections
_ADDRESS_64, _DISTANCE_32, _CALL_32, _DISTANCE_64 = 1, 2, 4, 24  # types of relocations

_UNWINDING = ".eh_frame"
"""The section that describes how exceptions of C++ leave a function; none pass through entries."""


class UnsupportedObject(Exception):
    """An object file that this loader cannot place in memory."""


class _Section(NamedTuple):
    """The header of a section, in the order of the file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    """A symbol, in the order of the file."""

    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


class LoadedObject(NamedTuple):
    """Compiled code in memory.

    Args:
        addresses: the address of each symbol that the object defines.
        memory: the memory, which must live as long as the code may run.
    """

    addresses: Mapping[str, int]
    memory: tuple[mmap.mmap, ...]


def load_object(data: bytes, resolve: Callable[[str], int]) -> LoadedObject:
    """Place an object file in the memory of this process.

    Args:
        data: the object file, for x86-64 Linux.
        resolve: returns the address of a symbol that the object does not define; it raises an
            `UnsupportedObject` where there is none.

    Returns:
        The code in memory.

    Raises:
        UnsupportedObject: the file is of another kind, or needs what this loader does not know.

    >>> load_object(b"text", lambda name: 0)
    Traceback (most recent call last):
    regard.ops.jit.object_code.UnsupportedObject: not an object file for x86-64
    """
    try:
        return _Loader(data).load(resolve)
    except (struct.error, IndexError, ValueError, OSError) as error:
        raise UnsupportedObject(f"a damaged object file, or no memory for code: {error}") from error


class _Loader:
    """The parts of an object file, and where its sections are placed.

    Args:
        data: the object file.
    """

    def __init__(self, data: bytes) -> None:
        if data[:7] != _MAGIC or struct.unpack_from("<HH", data, 16) != (_RELOCATABLE, _X86_64):
            raise UnsupportedObject("not an object file for x86-64")
        self.data = data
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        self.sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", data, start + i * size))
            for i in range(count)
        ]
        self.names = self.sections[names].offset
        self.symbols = [
            (self._text(self.sections[s.link].offset + symbol.name), symbol)
            for s in self.sections
            if s.type == _SYMBOLS
            for symbol in (
                _Symbol(*struct.unpack_from("<IBBHQQ", data, s.offset + 24 * i))
                for i in range(s.size // 24)
            )
        ]
        self.places: dict[int, int] = {}

    def load(self, resolve: Callable[[str], int]) -> LoadedObject:
        """Place the sections, and write the addresses of the symbols into them."""
        if any(s.flags & _THREAD_LOCAL for s in self.sections):
            raise UnsupportedObject("variables of threads")
        code, variables, common = self._layout()
        memory = [mmap.mmap(-1, size) for size in (code, variables)]
        first, second = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in memory)
        bases = {
            i: place + (second if self.sections[i].flags & _WRITABLE else first)
            for i, place in self.places.items()
        }
        for i, address in bases.items():
            s = self.sections[i]
            if s.type != _NO_BITS:
                ctypes.memmove(address, self.data[s.offset : s.offset + s.size], s.size)
        addresses = self._addresses(bases, {n: second + p for n, p in common.items()}, resolve)
        for s in self.sections:
            if s.type == _RELOCATIONS and s.info in bases:
                self._relocate(s, bases[s.info], addresses)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if protect(first, code, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "mprotect")
        named = {
            name: addresses[i]
            for i, (name, symbol) in enumerate(self.symbols)
            if name and symbol.section != _UNDEFINED
        }
        return LoadedObject(named, tuple(memory))

    def _text(self, start: int) -> str:
        """Return the text at a place of the file, which ends with a 0."""
        return self.data[start : self.data.index(b"\0", start)].decode()

    def _layout(self) -> tuple[int, int, dict[int, int]]:
        """Choose the place of each section in its memory. Return the sizes of both memories, that
        of code and constants and that of variables, and the places of the symbols without a
        section, which are variables of zeros.
        """
        sizes, common = [0, 0], {}
        for i, s in enumerate(self.sections):
            if s.flags & _ALLOCATED and s.size and self._text(self.names + s.name) != _UNWINDING:
                kind = 1 if s.flags & _WRITABLE else 0
                self.places[i] = _aligned(sizes[kind], s.alignment)
                sizes[kind] = self.places[i] + s.size
        for i, (_, symbol) in enumerate(self.symbols):
            if symbol.section == _COMMON:
                common[i] = _aligned(sizes[1], symbol.value)
                sizes[1] = common[i] + symbol.size
        code, variables = (_aligned(max(1, size), mmap.PAGESIZE) for size in sizes)
        return code, variables, common

    def _addresses(
        self, bases: Mapping[int, int], common: Mapping[int, int], resolve: Callable[[str], int]
    ) -> list[int]:
        """Return the address of each symbol; 0 for those of sections that are not placed."""
        addresses = []
        for i, (name, symbol) in enumerate(self.symbols):
            if symbol.section == _COMMON:
                addresses.append(common[i])
            elif symbol.section == _ABSOLUTE:
                addresses.append(symbol.value)
            elif symbol.section == _UNDEFINED:
                addresses.append(resolve(name) if name else 0)
            elif symbol.section >= _RESERVED:
                raise UnsupportedObject(f"the symbol {name} in section {symbol.section}")
            else:
                base = bases.get(symbol.section)
                addresses.append(0 if base is None else base + symbol.value)
        return addresses

    def _relocate(self, section: _Section, base: int, addresses: list[int]) -> None:
        """Write the addresses that a section of relocations asks for into the section at `base`."""
        for i in range(section.size // 24):
            offset, info, addend = struct.unpack_from("<QQq", self.data, section.offset + 24 * i)
            place, kind, symbol = base + offset, info & 0xFFFFFFFF, info >> 32
            if not addresses[symbol]:
                raise UnsupportedObject(f"no address of the symbol {self.symbols[symbol][0]}")
            value = addresses[symbol] + addend
            if kind == _ADDRESS_64:
                ctypes.c_uint64.from_address(place).value = value
            elif kind == _DISTANCE_64:
                ctypes.c_int64.from_address(place).value = value - place
            elif kind in (_DISTANCE_32, _CALL_32) and abs(value - place) < 1 << 31:
                ctypes.c_int32.from_address(place).value = value - place
            else:
                raise UnsupportedObject(f"a relocation of type {kind}")


def _aligned(place: int, alignment: int) -> int:
    """Return the first multiple of an alignment from a place on."""
    return -(-place // max(1, alignment)) * max(1, alignment)
