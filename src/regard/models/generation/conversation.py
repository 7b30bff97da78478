"""`Conversation`: messages with a model in turns, each of which reads only what is new."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from regard.errors import ArgumentError
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.decode_session import DecodeSession, PrefixCache
from regard.models.generation.generate import Generation, GenerationOptions
from regard.models.prompts import LanguageModel, encode_prompt


class _ReadTokens(PrefixCache):
    """Tokens that a session has read, which the next turn continues in place, without a copy."""

    def __init__(self, model: LanguageModel, ids: Sequence[int], session: DecodeSession) -> None:
        self.model, self.cache_config, self.ids = model, CacheConfig(), tuple(ids)
        self._session = session

    def fork(self, rows: int = 1) -> DecodeSession:
        """Return the session, which the next turn continues."""
        return self._session


class Conversation:
    """A conversation with a model in its chat template, whose caches stay between turns.

    A turn renders all messages, and reads only what follows the longest beginning of their ids that
    the caches hold. Where caches cannot be cut off there (a recurrent state), it reads all again.

    Args:
        model: a model with a tokenizer and a chat template.
        system: the message that says how to answer; None is the template's own, if it has one.
        options: max_tokens, stop strings and sampling of each answer.

    Attributes:
        messages: the messages so far.
        generation: the last answer, with its measurements; None before the first.

    Raises:
        FileError: the model has no tokenizer or no chat template.

    >>> import regard
    >>> from regard.models.chat_template import ChatTemplate
    >>> tiny = regard.load("tiny")
    >>> template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ eos }}{% endfor %}")
    >>> model = regard.models.Model(
    ...     tiny.decoder, tiny.tokenizer, tiny.config, chat_template=template
    ... )
    >>> talk = Conversation(model, options=GenerationOptions(max_tokens=2))
    >>> answers = ["".join(talk.answer(text)) for text in ("Return the", "and")]
    >>> [message["role"] for message in talk.messages], talk.generation.prompt_tokens
    (['user', 'assistant', 'user', 'assistant'], 2)
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        system: str | None = None,
        options: GenerationOptions | None = None,
    ) -> None:
        self.model, self.options = model, options or GenerationOptions()
        self.generation: Generation | None = None
        self._first = [] if system is None else [{"role": "system", "content": system}]
        model.chat_template, model.tokenizer  # noqa: B018  (raise here, not at the first answer)
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the one of the system, and empty the caches."""
        self.messages: list[dict[str, Any]] = list(self._first)
        self._read = self._nothing_read()

    def answer(self, text: str) -> Generator[str, None, None]:
        """Answer a message of the user, and stream the answer.

        Args:
            text: the message; names of special tokens in it are ordinary text.

        Yields:
            Pieces of the answer. What was generated until then stays in the conversation if the
            iterator is closed earlier.

        Raises:
            ArgumentError: the chat template refuses the messages.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode_prompt(self.model, messages, special=False)
        self._keep_beginning(ids)
        new = ids[len(self._read.ids) :]
        generation = Generation(self.model, new, self.options, self._read)
        self.generation = generation
        try:
            yield from generation
        finally:
            self.messages = [*messages, {"role": "assistant", "content": generation.text}]
            self._read = _ReadTokens(self.model, generation.read, self._read.session)

    def _keep_beginning(self, ids: Sequence[int]) -> None:
        """Remove from the caches what these ids do not begin with; one id at least is read."""
        known = self._read.ids
        pairs = enumerate(zip(known, ids[:-1], strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(known), len(ids) - 1))
        try:
            self._read.session.crop(shared)
            self._read = _ReadTokens(self.model, known[:shared], self._read.session)
        except ArgumentError:
            self._read = self._nothing_read()

    def _nothing_read(self) -> _ReadTokens:
        return _ReadTokens(self.model, (), DecodeSession(self.model.decoder))
