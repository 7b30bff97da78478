"""How loops are compiled: stamps of compiled code, records of arguments, threads, and the largest
of a line.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard

pytest.importorskip("numba", reason="what is tested here is compiled by Numba")
import numba

from regard.ops.jit import compile as module
from regard.ops.jit import openmp
from regard.ops.jit.argument_structs import (
    MAX_RUNS,
    ArrayField,
    FloatField,
    IntField,
    QuantizedField,
    StridedField,
    StructLayout,
)
from regard.ops.jit.compile import disk_cache, has_cpu_feature, njit_cached
from regard.ops.jit.entry_points import (
    array_4d_at,
    compile_entry,
    finish_task,
    struct_at,
    take_next,
    take_task,
)
from regard.ops.jit.source_stamps import SourceStamps

FOLDER = Path(regard.__file__).parent / "ops" / "jit"
NAMES = sorted(f.stem for f in FOLDER.glob("*.py") if f.stem != "__init__")


# stamps of compiled code


def package(folder: Path, **sources: str) -> SourceStamps:
    for name, text in sources.items():
        (folder / f"{name}.py").write_text(text)
    return SourceStamps("house.rooms", folder)


CHAIN = {
    "top": "from house.rooms.middle import f\n",
    "middle": "import house.rooms.bottom\n",
    "bottom": "x = 1\n",
    "beside": "y = 1\n",
    "several": "from house.rooms import (\n    bottom,\n    beside as b,\n)\nfrom house.roomsy "
    "import z\n",
}


def test_a_module_is_built_upon_what_it_imports(tmp_path: Path) -> None:
    stamps = package(tmp_path, **CHAIN)
    assert stamps.built_upon("top") == {"top", "middle", "bottom"}
    assert stamps.built_upon("several") == {"several", "bottom", "beside"}
    assert stamps.built_upon("nobody") == set()


@pytest.mark.parametrize("changed", ["top", "middle", "bottom"])
def test_a_change_anywhere_below_changes_the_stamp(tmp_path: Path, changed: str) -> None:
    before = package(tmp_path, **CHAIN).stamp("top")
    after = package(tmp_path, **CHAIN | {changed: CHAIN[changed] + "# more\n"})
    assert after.stamp("top") != before
    assert after.stamp("beside") == package(tmp_path, **CHAIN).stamp("beside")


def test_nothing_else_changes_it(tmp_path: Path) -> None:
    """A negative control: another module, a copy elsewhere, and the time of a file."""
    before = package(tmp_path, **CHAIN).stamp("top")
    assert package(tmp_path, **CHAIN | {"beside": "y = 2\n"}).stamp("top") == before
    os.utime(tmp_path / "bottom.py", (1, 1))
    assert SourceStamps("house.rooms", tmp_path).stamp("top") == before
    (tmp_path / "copy").mkdir()
    assert package(tmp_path / "copy", **CHAIN).stamp("top") == before


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_every_import_of_the_package_is_found(name: str) -> None:
    """What a parser says, in place of the pattern that the stamps are made with."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    taken: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "regard.ops.jit":
            taken |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            taken |= set(re.findall(r"^regard\.ops\.jit\.(\w+)$", node.module))
    taken &= set(NAMES)
    assert taken <= SourceStamps("regard.ops.jit", FOLDER).built_upon(name)


def test_loops_are_built_upon_loops_only() -> None:
    """Otherwise a change of a door, which is not compiled, would have all loops compiled anew."""
    stamps = SourceStamps("regard.ops.jit", FOLDER)
    for name in (
        "decode_loops",
        "decode_quantized_loops",
        "prefill_gradient_loops",
        "gemv_loops",
        "rms_norm_loops",
    ):
        assert not stamps.built_upon(name) & {"decode", "prefill", "openmp"}, name
    assert "half_precision" in stamps.built_upon("decode_quantized_loops")


TWO = {
    "below": """
        from pathlib import Path

        from regard.ops.jit.compile import disk_cache, njit_cached
        from regard.ops.jit.source_stamps import SourceStamps

        STAMPS = SourceStamps("{package}", Path(__file__).parent)

        def kept(function):
            made = njit_cached()(function)
            made._cache = disk_cache(function, STAMPS.stamp(function.__module__.split(".")[-1]))
            return made

        @kept
        def step(x):
            return x + {n}
        """,
    "above": """
        from {package}.below import kept, step

        @kept
        def twice(x):
            return step(step(x))
        """,
}


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A package of two compiled modules, written with a number in it and imported as if anew."""
    name = "stamped_package"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_and_import(n: int, comment: str = "") -> Any:
        for file, text in TWO.items():
            text = textwrap.dedent(text).replace("{package}", name).replace("{n}", str(n))
            (tmp_path / name / f"{file}.py").write_text(text + comment * (file == "above"))
        forget(name)
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.above").twice

    yield write_and_import
    forget(name)


def forget(name: str) -> None:
    for loaded in [x for x in sys.modules if x.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_a_changed_loop_is_compiled_anew_and_an_unchanged_one_never(
    two: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def hits(function: Any) -> int:
        return sum(function.stats.cache_hits.values())

    first = two(1)
    assert first(10) == 12
    assert hits(first) == 0
    again = two(1)
    assert again(10) == 12
    assert hits(again) == 1, "nothing changed: it was loaded"
    changed = two(5)  # in the other file, of the same size
    assert changed(10) == 20
    assert hits(changed) == 0
    commented = two(5, "# a comment\n")
    assert commented(10) == 20
    assert hits(commented) == 0, "the file itself changed"


def test_numbas_own_stamp_would_keep_the_old_loop(
    two: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: under a stamp that does not change, what was compiled in stays as it
    was.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(SourceStamps, "stamp", lambda self, name: "the same")
    assert two(1)(10) == 12
    assert two(5)(10) == 12, "the old loop"


def test_where_no_folder_can_be_written_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *given: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(module._StampedCache, "__init__", refuse)

    @njit_cached()
    def plus_one(x: int) -> int:
        return x + 1

    assert plus_one(1) == 2
    assert type(disk_cache(plus_one.py_func, "")).__name__ == "NullCache"


OWN_PROCESS = """
import sys
import torch
from regard.ops.jit.code_files import _loaded_objects
from regard.ops.rms_norm import rms_norm
rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
print("numba" in sys.modules, len(_loaded_objects))
"""


@pytest.mark.full
def test_stamps_in_processes_of_their_own(tmp_path: Path) -> None:
    """The real package in a copy: compiled once, loaded in the next process without Numba, also
    under other file times; compiled again after a change in what it is built upon, not after one
    elsewhere.
    """
    import shutil

    copy = tmp_path / "src"
    shutil.copytree(
        Path(regard.__file__).parent, copy / "regard", ignore=shutil.ignore_patterns("__pycache__")
    )
    jit = copy / "regard" / "ops" / "jit"

    def run() -> str:
        environment = os.environ | {"PYTHONPATH": str(copy)}
        environment.pop("NUMBA_CACHE_DIR", None)
        made = subprocess.run(
            [sys.executable, "-c", OWN_PROCESS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout.strip()

    compiled, loaded = "True 1", "False 1"
    assert run() == compiled
    assert run() == loaded
    for file in jit.glob("*.py"):
        os.utime(file, (1, 1))
    assert run() == loaded
    with (jit / "prefill_loops.py").open("a") as file:
        file.write("# elsewhere\n")
    assert run() == loaded
    with (jit / "half_precision.py").open("a") as file:
        file.write("# below\n")
    assert run() == compiled


# records of arguments

EVERY = StructLayout(
    IntField("n"),
    FloatField("x"),
    ArrayField("a", torch.float32),
    StridedField("k"),
    QuantizedField("c"),
    IntField("last"),
)


def test_a_record_is_what_its_fields_say() -> None:
    a = torch.arange(6, dtype=torch.float32).view(2, 3)
    packed = EVERY.pack(
        n=-3, x=0.1, a=a, k=(1, 2, 3, 4), c=tuple(range(100, 113)), last=np.iinfo(np.int64).max
    )
    read = np.frombuffer(packed, EVERY.dtype)[0]
    assert (read["taken"], read["done"], read["n"], read["x"]) == (0, 0, -3, 0.1)
    assert read["a"] == a.data_ptr()
    assert read["a_shape"].tolist() == [1, 1, 2, 3]
    assert (read["k"], read["k_steps"].tolist()) == (1, [2, 3, 4])
    assert read["c_steps"].tolist() == [101, 102, 103, 104]
    assert (read["c_scale"], read["c_zero"]) == (105, 106)
    assert read["c_scale_steps"].tolist() == [107, 108, 109, 110]
    assert (read["c_group"], read["c_bits"], read["last"]) == (111, 112, np.iinfo(np.int64).max)
    assert len(packed) * 8 == EVERY.dtype.itemsize
    assert repr(EVERY.fields[2:4]) == "(IntField('n'), FloatField('x'))"


def test_numbers_alone_are_given_in_the_order_of_the_list() -> None:
    record = StructLayout(IntField("n"), FloatField("x"))
    assert record.pack_numbers(5, 0.5) == record.pack(n=5, x=0.5)
    with pytest.raises(Exception, match="expected 4 items"):
        record.pack_numbers(5)


def test_what_is_missing_or_too_long_is_an_error() -> None:
    given: dict[str, Any] = {
        "n": 1,
        "x": 2.0,
        "a": torch.ones(1),
        "k": (1, 2, 3, 4),
        "c": range(13),
        "last": 3,
    }
    EVERY.pack(**given)
    with pytest.raises(KeyError, match="last"):
        EVERY.pack(**{k: x for k, x in given.items() if k != "last"})
    with pytest.raises(Exception, match="expected 27 items"):
        EVERY.pack(**given | {"k": (1, 2, 3)})


def test_compiled_code_reads_the_same_record() -> None:
    small = StructLayout(
        IntField("n"), FloatField("x"), ArrayField("a", torch.float64), IntField("out")
    )
    RECORD = small.dtype

    def entry(address: int) -> None:
        given: Any = struct_at(address, RECORD)
        a = array_4d_at(given.a, given.a_shape, np.float64)
        out = array_4d_at(given.out, (1, 1, 1, 3), np.float64)
        out[0, 0, 0, 0] = given.n + given.x
        out[0, 0, 0, 1] = a[0, 0, 1, 2]
        out[0, 0, 0, 2] = take_task(address) * 100 + take_task(address) * 10 + finish_task(address)

    code = compile_entry(entry)
    a, out = torch.arange(6.0, dtype=torch.float64).view(2, 3), torch.zeros(3, dtype=torch.float64)
    packed = small.pack(n=7, x=0.25, a=a, out=out.data_ptr())
    openmp.run_entry(code, packed, 1)
    assert out.tolist() == [7.25, 5.0, 10.0]
    assert packed[:2].tolist() == [2, 1], "the counters"


# threads


def test_where_openmp_is_looked_for(tmp_path: Path) -> None:
    own = Path(torch.__file__).parent / "lib"
    maps = tmp_path / "maps"
    lines = [
        "7f00-7f01 r-xp 0 08:01 1 /usr/lib/libiomp5.so",
        "7f01-7f02 r-xp 0 08:01 2 /usr/lib/libcompiler.so",
        f"7f02-7f03 r-xp 0 08:01 3 {own}/libgomp-24e2ab19.so.1.0.0",
        f"7f03-7f04 rw-p 0 08:01 3 {own}/libgomp-24e2ab19.so.1.0.0",
    ]
    maps.write_text("\n".join(lines))
    assert openmp.loaded_openmp_libraries(maps) == [
        f"{own}/libgomp-24e2ab19.so.1.0.0",
        "/usr/lib/libiomp5.so",
    ]
    assert openmp.loaded_openmp_libraries(tmp_path / "nothing") == [], (
        "a system without such a file"
    )


def test_the_first_library_that_has_it_is_taken() -> None:
    import _ctypes

    assert openmp.find_gomp_parallel([]) is None
    assert openmp.find_gomp_parallel(["/no/such/libgomp.so", _ctypes.__file__]) is None
    for path in openmp.loaded_openmp_libraries():
        assert openmp.find_gomp_parallel(["/no/such/libgomp.so", path]) is not None


@pytest.mark.parametrize("found", [True, False], ids=["openmp", "python threads"])
def test_all_threads_share_one_record(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if found and openmp.torch_openmp() is None:
        pytest.skip("this torch has no OpenMP")
    if not found:
        monkeypatch.setattr(openmp, "torch_openmp", lambda: None)
    tasks = StructLayout(IntField("out"), IntField("n"))
    RECORD = tasks.dtype

    def entry(address: int) -> None:
        given: Any = struct_at(address, RECORD)
        out = array_4d_at(given.out, (1, 1, 1, given.n), np.int64)
        while True:
            task = take_task(address)
            if task >= given.n:
                break
            out[0, 0, 0, task] += task + 1
            finish_task(address)

    out = torch.zeros(5000, dtype=torch.int64)
    packed = tasks.pack(out=out.data_ptr(), n=len(out))
    openmp.run_entry(compile_entry(entry), packed, 3)
    assert torch.equal(out, torch.arange(1, 5001)), "each task once"
    assert packed[1] == 5000


def next_tasks(counters: torch.Tensor, tasks: int, team: tuple[int, int], count: int) -> list[int]:
    """Take `count` tasks as one thread."""

    @numba.njit
    def take(address, tasks, team):  # type: ignore[no-untyped-def]
        return take_next(address, tasks, team)

    return [take(counters.data_ptr(), tasks, team) for _ in range(count)]


def test_a_thread_takes_the_tasks_of_its_own_run_first() -> None:
    counters = torch.zeros(2 + MAX_RUNS, dtype=torch.int64)
    assert next_tasks(counters, 10, (1, 3), 2) == [3, 4]  # runs: 0 to 2, 3 to 5, 6 to 9
    assert next_tasks(counters, 10, (5, 3), 3) == [6, 7, 8]  # thread 5 shares run 2
    assert next_tasks(counters, 10, (1, 3), 3) == [5, 9, 0]  # then what others have not begun
    assert next_tasks(counters, 10, (0, 3), 4) == [1, 2, 10, 10]
    assert next_tasks(torch.zeros_like(counters), 2, (0, 14), 3) == [0, 1, 2]  # empty runs


@pytest.mark.parametrize("runs", [1, 2, MAX_RUNS])
def test_each_task_of_the_runs_is_taken_once(runs: int) -> None:
    tasks = StructLayout(IntField("out"), IntField("n"), IntField("runs"), has_runs=True)
    RECORD = tasks.dtype

    def entry(address: int) -> None:
        given: Any = struct_at(address, RECORD)
        out = array_4d_at(given.out, (1, 1, 1, given.n), np.int64)
        team = (take_task(address), given.runs)
        task = take_next(address, given.n, team)
        while task < given.n:
            out[0, 0, 0, task] += task + 1
            finish_task(address)
            task = take_next(address, given.n, team)

    out = torch.zeros(5000, dtype=torch.int64)
    packed = tasks.pack(out=out.data_ptr(), n=len(out), runs=runs)
    openmp.run_entry(compile_entry(entry), packed, 3)
    assert torch.equal(out, torch.arange(1, 5001)), "each task once"
    assert list(packed[:2]) == [3, 5000]


# numbers and instructions


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 48, 61])
def test_the_largest_of_a_line(count: int) -> None:
    from regard.ops.jit.llvm_vectors import max_abs_of, max_of

    @numba.njit
    def both(x, at, n):  # type: ignore[no-untyped-def]
        return max_of(x, at, n), max_abs_of(x, at, n)

    x = np.random.default_rng(count).standard_normal((2, 64)).astype(np.float32) - 2
    x[:, :3] = 99, np.inf, -np.inf  # in front of where it begins
    for odd in (None, np.nan, -np.inf):
        if odd is not None and count:
            x[1, 3 + count // 2] = odd
        line = x[1, 3 : 3 + count]
        seen = line[~np.isnan(line)]
        found = both(x, 64 + 3, count)
        assert found[0] == max(seen, default=-np.inf)
        assert found[1] == max(abs(seen), default=0)


def test_no_instruction_is_named_for_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process where code names an instruction that it must not use."""
    config = numba.core.config
    from llvmlite import binding

    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"avx2": True, "avx512f": False})
    assert has_cpu_feature("avx2")
    assert not has_cpu_feature("avx512f")
    for name in ("CPU_NAME", "CPU_FEATURES"):
        with monkeypatch.context() as told:
            told.setattr(config, name, "generic")
            assert not has_cpu_feature("avx2")
            told.setattr(config, name, "host")
            assert has_cpu_feature("avx2")
    monkeypatch.setattr(config, "ENABLE_AVX", 0)
    assert not has_cpu_feature("avx2")
