// How the threads of a call share its work: each takes one task after another, by counters at the head of its arguments.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

#include "arguments.h"

// The number of the next task; no two threads get the same one.
inline int64_t take_task(Tasks* call) { return __atomic_fetch_add(&call->taken, 1, __ATOMIC_ACQ_REL); }

// Counts one task as finished, and returns how many were finished before.
inline int64_t finish_task(Tasks* call) { return __atomic_fetch_add(&call->done, 1, __ATOMIC_ACQ_REL); }

// The number of the next of `tasks` tasks for a thread, or `tasks` if none is left.
//
// The tasks form `runs` runs of equal length, each with a counter of its own. A thread takes the tasks of its own run one
// after another, and then those of other runs. So a core reads one piece of memory, which is faster by a fifth than small
// pieces in turns with other cores.
inline int64_t take_next(TasksInRuns* call, int64_t tasks, int64_t thread, int64_t runs) {
  for (int64_t i = 0; i < runs; i++) {
    int64_t run = (thread + i) % runs, first = tasks * run / runs, last = tasks * (run + 1) / runs;
    int64_t* taken = &call->taken_of_runs[run];
    if (first + __atomic_load_n(taken, __ATOMIC_ACQUIRE) < last) {
      int64_t task = first + __atomic_fetch_add(taken, 1, __ATOMIC_ACQ_REL);
      if (task < last) return task;
    }
  }
  return tasks;
}

// Returns when all tasks of a call are finished. A thread that has looked long enough offers its core to others.
inline void wait_until_finished(const Tasks* call, int64_t tasks) {
  for (int looks = 0; __atomic_load_n(&call->done, __ATOMIC_ACQUIRE) < tasks; looks++) {
#if defined(__x86_64__)
    if (looks < 2000) {
      _mm_pause();
      continue;
    }
#endif
#if defined(__unix__) || defined(__APPLE__)
    sched_yield();
#endif
  }
}
