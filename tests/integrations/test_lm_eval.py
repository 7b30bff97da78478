"""The model type `regard` of lm-evaluation-harness, against its type `hf` on the same folder."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.files.named_packages import packaged_source
from regard.models import Model
from tests.models.small import named_model

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = "Return the number of items in the list.\n" * 3
PAIRS = [("Return the", " number of items"), ("", "If a"), ("a b c d e f g h ", "i")]


def library() -> Any:
    reason = "python -m pip install 'lm_eval[hf]'"
    pytest.importorskip("lm_eval", reason=reason)
    pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    return pytest.importorskip("regard.integrations.lm_eval", reason=reason)


def requests(*arguments: object) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=x) for x in arguments]


def both(path: Path, **options: Any) -> tuple[Any, Any]:
    """Our model and that of the type `hf`, of one folder or GGUF file in fp32."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    folder, names = (
        (path, dict[str, Any]()) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    )
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **names
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **names)
    ours = library().HarnessModel(str(path), dtype="float32", **options)
    if tokenizer.eos_token is None:  # our small model names none in its files
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ours.eot_token_id)
    return ours, HFLM(pretrained=network.eval(), tokenizer=tokenizer, device="cpu", **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library()
    return regard.load("tiny").save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_likelihoods_are_those_of_hf(tiny: Path, batch_size: int) -> None:
    ours, theirs = both(tiny, batch_size=batch_size, max_length=24)  # a window of the long text
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    found = ours.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    expected = theirs.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], rel=1e-5)
    assert [x for _, x in found] == [x for _, x in expected]
    texts = requests((TEXT,), ("a",))
    expected_sums = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(expected_sums, rel=1e-5)
    other = ours.loglikelihood(requests(("Return a", PAIRS[0][1])), disable_tqdm=True)
    assert abs(other[0][0] - found[0][0]) > 0.01, "the context takes part"


def test_texts_stop_where_hf_stops(tiny: Path) -> None:
    ours, theirs = both(tiny)
    asked = requests(("Return the", {"until": [" of", "\n"], "max_gen_toks": 12}))
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


@pytest.mark.full
def test_the_perplexity_of_smollm2_is_that_of_hf() -> None:
    library()
    pytest.importorskip("accelerate", reason="python -m pip install accelerate")
    named_model("smollm2", Model)  # or a skip
    ours, theirs = both(Path(packaged_source("smollm2")))
    texts = requests((TEXT,))
    (found,), (expected,) = ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts)
    count = len(ours.tok_encode(TEXT))
    assert math.exp(-found / count) == pytest.approx(math.exp(-expected / count), rel=1e-4)


def test_the_harness_finds_the_type_and_what_is_refused() -> None:
    module = library()
    from lm_eval.api.registry import get_model

    assert get_model("regard") is module.HarnessModel
    assert (
        module.HarnessModel.create_from_arg_string("pretrained=tiny,max_length=9").max_length == 9
    )
    for options, word in (({"peft": "x"}, "peft"), ({"batch_size": "auto"}, "batch_size")):
        with pytest.raises(ArgumentError, match=word):
            module.HarnessModel("tiny", **options)
