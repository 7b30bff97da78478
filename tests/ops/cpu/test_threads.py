"""Threads of compiled code: torch's own, or Python's; how they share tasks; forks and spawns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.ops.cpu import threads
from regard.ops.cpu.arguments import MAX_RUNS, struct_layout
from tests.kernels import require_kernels
from tests.ops.cpu.compiled import load

require_kernels()

TASKS = """
#include "tasks.h"

// Adds n + 1 to y[n] for each task n that a thread gets.
extern "C" __attribute__((visibility("default"))) void count_tasks(void* given) {
  auto call = static_cast<GatedProduct*>(given);
  auto out = static_cast<int64_t*>(call->out);
  for (int64_t task; (task = take_task(call)) < call->n;) {
    out[task] += task + 1;
    finish_task(call);
  }
  wait_until_finished(call, call->n);
}

// The same with runs.
extern "C" __attribute__((visibility("default"))) void count_runs(void* given) {
  auto call = static_cast<Gemv*>(given);
  auto out = static_cast<int64_t*>(call->y);
  int64_t thread = take_task(call), task;
  while ((task = take_next(call, call->N, thread, call->runs)) < call->N) {
    out[task] += task + 1;
    finish_task(call);
  }
}

extern "C" __attribute__((visibility("default")))
int64_t next_task(void* call, int64_t tasks, int64_t thread, int64_t runs) {
  return take_next(static_cast<TasksInRuns*>(call), tasks, thread, runs);
}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Functions that share tasks as the kernels do."""
    import ctypes

    library = load(TASKS, tmp_path_factory.mktemp("tasks"))
    library.next_task.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]
    library.next_task.restype = ctypes.c_int64
    return library


def address(function: Any) -> int:
    import ctypes

    return ctypes.cast(function, ctypes.c_void_p).value or 0


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
    assert threads.loaded_openmp_libraries(maps) == [
        f"{own}/libgomp-24e2ab19.so.1.0.0",
        "/usr/lib/libiomp5.so",
    ]
    assert threads.loaded_openmp_libraries(tmp_path / "nothing") == [], (
        "a system without such a file"
    )


def test_the_first_library_that_has_it_is_taken() -> None:
    import _ctypes

    assert threads.find_gomp_parallel([]) is None
    assert threads.find_gomp_parallel(["/no/such/libgomp.so", _ctypes.__file__]) is None
    for path in threads.loaded_openmp_libraries():
        assert threads.find_gomp_parallel(["/no/such/libgomp.so", path]) is not None


@pytest.mark.parametrize("found", [True, False], ids=["openmp", "python threads"])
def test_all_threads_share_one_record(
    found: bool, tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found and threads.torch_openmp() is None:
        pytest.skip("this torch has no OpenMP")
    if not found:
        monkeypatch.setattr(threads, "torch_openmp", lambda: None)
    out = torch.zeros(5000, dtype=torch.int64)
    packed = struct_layout("GatedProduct").pack(n=len(out), gate=0, up=0, out=out.data_ptr())
    threads.run_entry(address(tasks.count_tasks), packed, 3)
    assert torch.equal(out, torch.arange(1, 5001)), "each task once"
    assert packed[1] == 5000


def next_tasks(
    tasks: Any, counters: torch.Tensor, count: int, team: tuple[int, int], times: int
) -> list[int]:
    """Take tasks as one thread."""
    return [tasks.next_task(counters.data_ptr(), count, *team) for _ in range(times)]


def test_a_thread_takes_the_tasks_of_its_own_run_first(tasks: Any) -> None:
    counters = torch.zeros(2 + MAX_RUNS, dtype=torch.int64)
    assert next_tasks(tasks, counters, 10, (1, 3), 2) == [3, 4]  # runs: 0 to 2, 3 to 5, 6 to 9
    assert next_tasks(tasks, counters, 10, (5, 3), 3) == [6, 7, 8]  # thread 5 shares run 2
    assert next_tasks(tasks, counters, 10, (1, 3), 3) == [5, 9, 0]  # then what others left
    assert next_tasks(tasks, counters, 10, (0, 3), 4) == [1, 2, 10, 10]
    assert next_tasks(tasks, torch.zeros_like(counters), 2, (0, 14), 3) == [0, 1, 2]  # empty runs


@pytest.mark.parametrize("runs", [1, 2, MAX_RUNS])
def test_each_task_of_the_runs_is_taken_once(runs: int, tasks: Any) -> None:
    out = torch.zeros(5000, dtype=torch.int64)
    numbers = {"R": 1, "M": 1, "N": len(out), "x": 0, "w": 0, "b": 0, "y": out.data_ptr()}
    packed = struct_layout("Gemv").pack(**numbers, runs=runs)
    threads.run_entry(address(tasks.count_runs), packed, 3)
    assert torch.equal(out, torch.arange(1, 5001)), "each task once"
    assert list(packed[:2]) == [3, 5000]


OTHER_PROCESS = """
import multiprocessing, sys, torch
from regard.ops.tokenwise import gemv

X = torch.arange(3 * 300.0).view(3, 300) / 300
W = torch.arange(600 * 300.0).view(600, 300).sin()

def compute(_):
    return gemv(X, W)[:, ::100].tolist()  # in a forked process torch's own threads would hang

if __name__ == "__main__":
    torch.set_num_threads(2)
    first = compute(0)  # torch's threads exist now
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        assert pool.map(compute, range(2)) == [first, first]
    assert compute(0) == first
    print("same")
"""


@pytest.mark.full
@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_another_process_computes_the_same(way: str, tmp_path: Path) -> None:
    path = tmp_path / "other_process.py"
    path.write_text(OTHER_PROCESS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path, way],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr
