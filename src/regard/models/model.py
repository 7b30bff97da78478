"""A decoder with its tokenizer and its config: `Model`, as `regard.load` returns it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.argument_checks import check_keyword_names
from regard.caches import Cache
from regard.errors import ArgumentError, FileError
from regard.models.chat_template import ChatTemplate, Messages
from regard.models.decoder import Decoder, check_ids
from regard.models.generation.beam_search import BeamCompletion, beam_search_text
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.decode_session import PrefixCache
from regard.models.generation.generate import BatchGeneration, Generation, GenerationOptions
from regard.models.generation.sampling import SamplingKeywords, SamplingParams
from regard.models.prompts import (
    Prompt,
    encode_messages,
    encode_text,
    is_single_prompt,
)
from regard.models.text_model import TextModel
from regard.models.tokenizer import Tokenizer
from regard.span import Positions


class Model(TextModel):
    """A decoder with its tokenizer and its config, as `regard.load` returns it.

    Args:
        decoder: the network: ids [B, T] -> logits [B, T, V].
        tokenizer: converts texts to ids and back; with None, the model takes only ids.
        config: the frozen config of its family.
        eos_ids: the ids that end a text; None is the tokenizer's end of text, if it has one.
        chat_template: makes a text of the messages of a conversation; None if the model has none.
        newly_initialized: names of weights that the checkpoint lacked and was allowed to lack; they
            have random values.
        ignored: keys of config.json, tensors and files that were not used; see `regard.load`.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        config: object,
        *,
        eos_ids: Collection[int] | None = None,
        chat_template: ChatTemplate | None = None,
        newly_initialized: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(decoder, tokenizer, config, newly_initialized, ignored)
        self.decoder = decoder
        if eos_ids is None:
            end = None if tokenizer is None else tokenizer.end_of_text
            eos_ids = () if end is None else (end,)
        self.eos_ids = frozenset(eos_ids)
        self._chat_template = chat_template

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that makes a text of the messages of a conversation."""
        if self._chat_template is None:
            raise FileError(
                "this model has no chat template, so that it takes no messages: its files hold "
                "none (chat_template.jinja, tokenizer_config.json, or tokenizer.chat_template of a "
                "GGUF file). Continue a text instead (regard generate; special=True or --special "
                "reads names of special tokens in it), or add chat_template.jinja of a model that "
                "was trained with one"
            )
        return self._chat_template

    @property
    def has_head(self) -> bool:
        """Whether the model returns logits; a base model saved alone may have no head."""
        return self.decoder.head is not None

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Compute the logits for the token after each given token. `model(...)` does the same.

        Args:
            ids: token ids [B, T]; with caches, the ids that follow those in the caches.
            positions: positions [B, T], -1 for padding; None continues the caches, or from 0.
            caches: one cache per layer, from `new_caches`, which are updated; None is no cache.
            backend: the attention kernel, or "auto".

        Returns:
            Logits [B, T, V].

        Raises:
            ArgumentError: an id is outside the vocabulary, the number of caches is not the number
                of layers, or the model has no head.

        >>> import regard, torch
        >>> regard.load("tiny").forward(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 1920])
        """
        check_ids(ids, self.config.vocab_size)
        logits: Tensor = self.decoder(ids, positions, caches, backend=backend)
        return logits

    __call__ = forward

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """Compute the hidden states after the last norm, from which the head computes logits.

        Args:
            ids, positions, caches, backend: as in `forward`.

        Returns:
            Hidden states [B, T, M].

        Raises:
            ArgumentError: an id is outside the vocabulary, or the number of caches is wrong.
        """
        check_ids(ids, self.config.vocab_size)
        return self.decoder.hidden(ids, positions, caches, backend=backend)

    def new_caches(self) -> list[Cache]:
        """Create an empty cache for each layer.

        Returns:
            One cache per layer, each of the kind that suits the layer's attention.
        """
        return self.decoder.new_caches()

    def encode(self, text: str | Messages, *, special: bool | None = None) -> Int[Tensor, "1 T"]:
        """Convert a text to ids, with the special tokens that the tokenizer adds; or the messages
        of a conversation, with those of the chat template.

        Args:
            text: not empty; or dicts with "role" and "content".
            special: as in `generate`.

        Returns:
            Token ids [1, T].

        Raises:
            ArgumentError: the text has no tokens.
            FileError: the model has no tokenizer, or no chat template for messages.
        """
        if isinstance(text, str):
            ids = encode_text(self.tokenizer, text, special=special, template=True)
        else:
            ids = encode_messages(self.tokenizer, self.chat_template, text, special=special)
        if not ids:
            raise ArgumentError(f"the text {text!r} has no tokens; give at least one character")
        return torch.tensor([ids], device=self.device)

    @overload
    def generate(
        self,
        prompt: str | list[int] | tuple[int, ...] | Tensor | list[dict[str, Any]],
        *,
        max_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        prefix: PrefixCache | None = ...,
        chunk: int | None = ...,
        max_context: int | None = ...,
        cache: str | None = ...,
        cuda_graph: bool = ...,
        special: bool | None = ...,
        **choices: Unpack[SamplingKeywords],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: list[Prompt] | tuple[Prompt, ...],
        *,
        max_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        prefix: PrefixCache | None = ...,
        chunk: int | None = ...,
        max_context: int | None = ...,
        cache: str | None = ...,
        cuda_graph: bool = ...,
        special: bool | None = ...,
        **choices: Unpack[SamplingKeywords],
    ) -> BatchGeneration: ...

    def generate(
        self,
        prompt: Any,
        *,
        max_tokens: int = 64,
        stop: str | Sequence[str] = (),
        prefix: PrefixCache | None = None,
        chunk: int | None = 512,
        max_context: int | None = None,
        cache: str | None = None,
        cuda_graph: bool = False,
        special: bool | None = None,
        **choices: Unpack[SamplingKeywords],
    ) -> Generation | BatchGeneration:
        """Continue one prompt, or several prompts as a batch, and stream the new text.

        The most likely token is chosen at each step, unless `temperature` is above 0. Neither
        `chunk` nor the kind of an exact cache changes the result.

        Args:
            prompt: one text, its ids (ints, or an integer tensor [T] or [1, T]), or the messages
                of a conversation (dicts with "role" and "content"), which the chat template of the
                model makes a text; a list of prompts is one batch (`BatchGeneration`). Only with
                `prefix` may a prompt be empty.
            max_tokens: the largest number of new tokens; an id of `eos_ids` ends them, too.
            stop: one or several strings that end the text; they are not part of it.
            prefix: a prompt that `cache_prefix` has read, which this one continues.
            chunk: the number of prompt tokens that one forward pass reads; None is all of them.
            max_context: the largest number of tokens in all; the cache decides what comes then.
            cache: "growing" (the default), "fixed", "paged", "quantized", "fp8", "ring",
                "streaming", or an eviction rule such as "h2o"; see
                `regard.models.generation.CacheConfig`.
            cuda_graph: capture the step that decodes a token as a CUDA graph. It needs a CUDA
                device, cache "growing", "fixed", "ring" or "streaming", and no experts.
            special: whether names of special tokens in a text or a message are these tokens, as
                in text that a chat template made; False reads them as ordinary text, and None does
                so with a warning.
            **choices: temperature, top_k, top_p, min_p, repetition_penalty and seed, as in
                `SamplingParams`; PyTorch's global generator is not used.

        Returns:
            An iterator of pieces of text, each as soon as it is known; for several prompts, of
            pairs (index of the prompt, piece). Without a tokenizer there are no pieces, only `ids`.

        Raises:
            ArgumentError, ArgumentTypeError: a prompt is empty, an option is out of range, the
                tokens do not fit into `max_context`, or the step cannot be captured.

        >>> import regard
        >>> model = regard.load("tiny")
        >>> "".join(model.generate("Return the", max_tokens=9, stop=" of")).count(" of")
        0
        >>> prompts, choices = ["Return the", "If a"], {"temperature": 0.8, "top_p": 0.9, "seed": 1}
        >>> batch = model.generate(prompts, max_tokens=9, **choices)
        >>> sorted({row for row, piece in batch}), [row.finished for row in batch.rows]
        ([0, 1], ['length', 'length'])
        """
        check_keyword_names("generate", choices, SamplingKeywords.__annotations__)
        options = GenerationOptions(
            max_tokens,
            stop,
            chunk,
            SamplingParams(**choices),
            _cache_config(cache, max_context),
            cuda_graph,
            special,
        )
        if is_single_prompt(prompt):
            return Generation(self, prompt, options, prefix)
        return BatchGeneration(self, prompt, options, prefix)

    def cache_prefix(
        self,
        prompt: Prompt,
        *,
        prefix: PrefixCache | None = None,
        chunk: int | None = 512,
        max_context: int | None = None,
        cache: str | None = None,
        special: bool | None = None,
    ) -> PrefixCache:
        """Read a prompt once and keep its caches, for several continuations (prefix caching).

        Args:
            prompt: the text to read, its ids, or messages; not empty.
            prefix: a prompt that was read before, which this one continues.
            chunk, max_context, cache, special: as in `generate`.

        Returns:
            The prefix, for `generate(text, prefix=...)`.

        Raises:
            ArgumentError: the prompt is empty, or it does not fit into `max_context`.

        >>> import regard
        >>> model = regard.load("tiny")
        >>> prefix = model.cache_prefix("Return the")
        >>> options = {"prefix": prefix, "max_tokens": 3, "temperature": 1.0}
        >>> ["".join(model.generate("", seed=seed, **options)) != "" for seed in (1, 2)]
        [True, True]
        """
        cache_config = _cache_config(cache, max_context)
        return PrefixCache(
            self, prompt, prefix=prefix, chunk=chunk, cache_config=cache_config, special=special
        )

    def beam_search(
        self,
        prompt: Prompt,
        *,
        beams: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        chunk: int | None = 512,
        max_context: int | None = None,
        cache: str | None = None,
        special: bool | None = None,
    ) -> list[BeamCompletion]:
        """Search the most likely continuations of a prompt as a whole; see `beam_search`.

        Args:
            prompt: the text to continue, its ids, or messages; not empty.
            beams: how many candidates are kept at every step, and the largest number of results.
            max_tokens: the largest number of new tokens, at least 1.
            length_penalty: score = sum of log p / n^length_penalty; 0 ranks by probability.
            chunk, max_context, cache, special: as in `generate`.

        Returns:
            At most `beams` continuations, best first.

        Raises:
            ArgumentError: the prompt is empty, an option is out of range, or the context too small.

        >>> import regard
        >>> best, second = regard.load("tiny").beam_search("Return the", beams=2, max_tokens=4)
        >>> len(best.ids), best.score > second.score
        (4, True)
        """
        options = GenerationOptions(
            max_tokens,
            chunk=chunk,
            cache_config=_cache_config(cache, max_context),
            special=special,
        )
        result = beam_search_text(self, prompt, options, beams=beams, length_penalty=length_penalty)
        return result.completions

    def _example_run(self) -> Callable[[], object]:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        return lambda: self.forward(ids) if self.has_head else self.hidden(ids)

    def _json_files(self) -> Mapping[str, object]:
        files: dict[str, object] = {
            "generation_config.json": {"eos_token_id": sorted(self.eos_ids)}
        }
        if (template := self._chat_template) is not None:
            content = {"chat_template": template.source, **template.special_tokens}
            files["tokenizer_config.json"] = content
        return files


def _cache_config(cache: str | None, max_context: int | None) -> CacheConfig | None:
    """Return the cache configuration that was asked for; None if nothing was."""
    if cache is None and max_context is None:
        return None
    return CacheConfig(cache or "growing", max_context)
