"""Generation over ranks gives the text of one process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import regard
from regard.parallel import spawn
from tests.parallel import sequence_ranks
from tests.parallel.sequence_ranks import TEXT


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("W", [2, 3])
def test_the_text_is_that_of_one_process(W: int, sampled: bool) -> None:
    model = regard.load("tiny")
    options = {"temperature": 0.8, "seed": 3} if sampled else {}
    expected = "".join(model.generate(TEXT, max_tokens=12, **options))
    beams = [x.text for x in model.beam_search(TEXT, beams=2, max_tokens=4)]
    results = spawn(sequence_ranks.generate_text, W, sampled)
    assert [text for text, _, _ in results] == [expected] * W
    assert [found for _, _, found in results] == [beams] * W
    stored = [n for _, n, _ in results]
    prompt_tokens = len(model.encode(TEXT)[0])
    assert sum(stored) == prompt_tokens + 11  # the last token is never read
    assert max(stored) - min(stored) <= 2


@pytest.mark.full
def test_the_command_generates_on_the_ranks_of_torchrun() -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "regard", "generate", TEXT, "--max-tokens", "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = []
    for command in (arguments, [*start, *arguments, "--parallel", "context"]):
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        printed.append(done.stdout)
        assert done.stderr.count("tokens/s") >= 1
    assert printed[0] == printed[1]  # the first rank prints alone
    refused = subprocess.run(
        [sys.executable, *arguments, "--parallel", "context"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert refused.returncode == 2
    assert "torchrun" in refused.stderr


def test_what_cannot_be_generated_over_ranks_is_refused_by_name() -> None:
    expected = [
        "too few to be cut into two runs",
        "prompts of different lengths",
        'needs cache="growing" without max_context',
        "to call a model directly, use regard.parallel.sequence",
        "must end there",
    ]
    for texts in spawn(sequence_ranks.refused_generations, 2):
        for text, words in zip(texts, expected, strict=True):
            assert words in text
