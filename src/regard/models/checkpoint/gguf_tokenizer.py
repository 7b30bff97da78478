"""The tokenizer in the metadata of a GGUF file: "gpt2" (byte-level BPE, whose pattern has one of
the names in `PATTERNS`), "llama" (SentencePiece's BPE by scores), "gemma4" (the same by merges),
"t5" (Unigram) or "bert" (WordPiece). A tokenizer.json beside the file, with the same tokens,
replaces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from regard.did_you_mean import suggest
from regard.errors import FileError
from regard.files.gguf_files import GgufHeader, MetadataValue, invalid_gguf
from regard.files.reading import checked_path_or_none
from regard.models.tokenizer import MAX_PIECE_LENGTH, MAX_TOKEN_ID, Tokenizer
from regard.units import plural
from regard.untrusted_text import error_text, short_repr

# the parts of which most patterns of words are made
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _words(
    digits: str, before: str = rf"{_SUFFIX}|", after: str = r"[\r\n]*", spaces: str = _SPACES
) -> str:
    """Return the pattern of letters, digits, and other signs with the line ends after them."""
    return (
        rf"{before}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after}|{spaces}"
    )


def _cased_words(digits: str, suffix: str = "", upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Return the pattern in which a word begins anew before a capital after small letters."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _signs_and_words(after: str = r"[\r\n]*", spaces: str = _SPACES) -> str:
    """Return DeepSeek V3's pattern of signs with letters, letters, and signs."""
    return (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+{after}|{spaces}"
    )


_ONE_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_LLAMA3, _QWEN2 = _words(_THREE_DIGITS), _words(_ONE_DIGIT)
_GPT4O = _cased_words(_THREE_DIGITS, f"{_SUFFIX}?")
_DEEPSEEK3 = (_THREE_DIGITS, _CJK, _signs_and_words())
_FINNISH = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_HAN = r"&&[^\p{Han}]]"
_RULES: Mapping[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum mpt olmo "
    "modern-bert jina-v1-en jina-v2-code roberta-bpe jais trillion granite-docling exaone4",
    (_ONE_DIGIT, _GPT2): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    (_LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
    "dbrx smaug-bpe glm4 chatglm-bpe",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2",
    (_QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),): "qwen35",
    (
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2,
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ): "default",
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (_FINNISH,): "poro-chat bloom gpt3-finnish",
    (_FINNISH, _ONE_DIGIT): "viking",
    (
        _words(
            _THREE_DIGITS,
            spaces=r"\s*[\r\n]+"
            + "".join(rf"|\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1))
            + r"|\s{1,2}(?!\S)|\s{1}",
        ),
    ): "jais-2",
    (
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        _ONE_DIGIT,
    ): "deepseek-coder",
    (
        "[\r\n]",
        r"\s?[\p{L}&&[\p{Lu}\p{Ll}\p{Lt}]]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ): "deepseek-llm",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    (
        _THREE_DIGITS,
        _CJK,
        _signs_and_words("", r"[\r\n]|\s+(?!\S)|\s+"),
        _ONE_DIGIT,
    ): "spark2_5",
    (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
        "\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK,
        _cased_words(_ONE_DIGIT, f"{_SUFFIX}?"),
    ): "youtu",
    (_cased_words(_ONE_DIGIT),): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
    (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O): "tiny_aya cohere2moe",
    (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        "([\t\n]|    |  )",
        _ONE_DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ): "chameleon",
    (
        r"\p{Han}+|"
        + _cased_words(
            _THREE_DIGITS, f"{_SUFFIX}?", f"{_UPPER[:-1]}{_HAN}", f"{_LOWER[:-1]}{_HAN}"
        ).replace(r"[\r\n/]*", r"[\r\n]*"),
    ): "kimi-k2",
    (r"\p{N}+", r"\d{1,3}(?=(?:\d{3})*(?!\d))"): "superbpe",
    (
        _words(_ONE_DIGIT, r"'(?i:[sdmt]|ll|ve|re)|", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+"),
    ): "bailingmoe bailingmoe2 llada-moe",
    (_words(_ONE_DIGIT, after="").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{N}\r\n]+"),): (
        "seed-coder"
    ),
    (_words(_ONE_DIGIT, before=""),): "ufakzeka",
    (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        _ASIAN,
        _signs_and_words(),
    ): "afmoe",
    (r"[^\n]+|[\n]+", _QWEN2): "laguna",
    (
        _words(_ONE_DIGIT, after=r"[\r\n/]?", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+").replace(
            r"\p{L}+", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
        ),
    ): "exaone-moe",
    (_THREE_DIGITS, _words(r"\p{N}+")): "minicpm5",
}
PATTERNS: Mapping[str, tuple[str, ...]] = {
    name: patterns for patterns, names in _RULES.items() for name in names.split()
}
"""`tokenizer.ggml.pre` -> the patterns by which a text is split, one after the other."""
# published with the normalization NFC
_NORMALIZED = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35", "stablelm2"})
_NAMES_THAT_BEGIN = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken "
    "chameleon"
)
_BEGINS = frozenset(_NAMES_THAT_BEGIN.split())
"""Rules of llama.cpp that put the first token before a text if the file does not say."""
# a word that is a token is not split first
_WHOLE_WORDS = _BEGINS - {"chameleon"} | {"youtu", "minicpm5", "granite-embed-multi-97m"}

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens in `tokenizer.ggml.token_type`."""
_PIECES = ("llama", "gemma4")
"""Kinds of tokenizers whose tokens have a mark for a space."""
_SPACE = "\u2581"
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDING = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[ <|fim_pad|> "
    "<fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|>"
)
_END_TEXTS = frozenset(_ENDING.split())
"""Tokens that end a text wherever a vocabulary has them, as in llama.cpp."""
_NO_END = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"}),
    "</s>": ({"<|tool_response>"},),
}
"""Token of `_END_TEXTS` -> tokens beside which it separates parts of one answer."""


def gguf_tokenizer(header: GgufHeader) -> Tokenizer | None:
    """Return the tokenizer of a GGUF file, or of tokenizer.json beside it."""
    values = _Values(header)
    kind = values.get("model", "none")
    tokens = None if kind == "none" else _tokens(values)
    beside = checked_path_or_none(header.file.parent, "tokenizer.json")
    if beside is not None:
        tokenizer = Tokenizer.load(beside)
        _check_same(header, tokenizer, tokens or [])
        return tokenizer
    if tokens is None:
        return None
    if kind == "gpt2":
        backend = _byte_level(values, tokens)
    elif kind in _PIECES:
        backend = _sentencepiece(values, tokens, by_merges=kind == "gemma4")
    elif kind == "t5":
        backend = _unigram(values, tokens)
    elif kind == "bert":
        return Tokenizer(_word_pieces(values, tokens))
    else:
        raise _cannot_build(
            header,
            f"is of the kind {short_repr(kind)}; built are gpt2, llama, gemma4, t5 and bert",
        )
    types = values.numbers("token_type", len(tokens))
    backend.add_special_tokens(_added(tokens, types, CONTROL, special=True))
    backend.add_tokens(_added(tokens, types, USER_DEFINED, special=False))
    begins = kind in _PIECES or values.get("pre", None) in _BEGINS
    _add_template(values, backend, tokens, has_start=begins, has_end=kind == "t5")
    return Tokenizer(backend)


def gguf_eos_ids(header: GgufHeader) -> frozenset[int] | None:
    """Return the ids that end a text, by the keys of the file and by the texts of tokens, or None
    if there are none.
    """
    values = _Values(header)
    end_ids = [values.get(f"{key}_token_id", None) for key in _END_KEYS]
    tokens = values.get("tokens", None)
    id_of_end = (
        {x: i for i, x in enumerate(tokens) if isinstance(x, str) and x in _END_TEXTS}
        if isinstance(tokens, list)
        else {}
    )
    for token, others in _NO_END.items():
        if any(group <= id_of_end.keys() for group in others):
            id_of_end.pop(token, None)
    return frozenset(i for i in (*end_ids, *id_of_end.values()) if type(i) is int) or None


class _Values:
    """The keys of a file that describe its tokenizer."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def get(self, key: str, default: MetadataValue | None) -> MetadataValue | None:
        return self.header.metadata.get(f"tokenizer.ggml.{key}", default)

    def texts(self, key: str) -> list[str]:
        value = self.get(key, None)
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.invalid(key, "must be a list of strings")
        return [str(x) for x in value]

    def numbers(self, key: str, count: int) -> list[Any]:
        value = self.get(key, [0] * count)
        number = (int, float)
        if not isinstance(value, list) or not all(type(x) in number for x in value):
            raise self.invalid(key, "must be a list of numbers")
        if len(value) != count:
            raise self.invalid(
                key, f"has {plural(len(value), 'value')} for {plural(count, 'token')}"
            )
        return value

    def token_id(self, key: str, count: int) -> int | None:
        value = self.get(key, None)
        if value is not None and not (type(value) is int and 0 <= value < count):
            raise self.invalid(key, f"is {short_repr(value)}; there are {plural(count, 'token')}")
        return value

    def invalid(self, key: str, problem: str) -> FileError:
        return invalid_gguf(self.header.file, f"tokenizer.ggml.{key} {problem}")

    @contextmanager
    def refused(self, key: str, verb: str = "are") -> Iterator[None]:
        """Give what the package `tokenizers` refuses the name of the key."""
        try:
            yield
        except Exception as error:  # the package has no error class of its own
            raise self.invalid(key, f"{verb} refused: {error_text(error, 300)}") from error


def _tokens(values: _Values) -> list[str]:
    tokens = values.texts("tokens")
    if not tokens or len(tokens) >= MAX_TOKEN_ID:
        raise values.invalid("tokens", f"has {len(tokens)}; 1 to {MAX_TOKEN_ID - 1} are read")
    twice = next((x for x, count in Counter(tokens).items() if count > 1), None)
    if twice is not None:
        raise values.invalid("tokens", f"has {short_repr(twice)} twice")
    return tokens


def _check_same(header: GgufHeader, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise if tokenizer.json beside the file has other tokens than the file."""
    vocabulary = tokenizer.vocabulary()
    wrong = next((i for i, x in enumerate(tokens) if vocabulary.get(x, i) != i), None)
    if wrong is not None or any(i >= len(tokens) > 0 for i in vocabulary.values()):
        problem = (
            "more tokens than the file"
            if wrong is None
            else f"the token {short_repr(tokens[wrong])} at {vocabulary[tokens[wrong]]} and not at "
            f"{wrong}, where the file has it"
        )
        raise FileError(
            f"{header.file}: tokenizer.json beside it has {problem}; put the one of this model "
            "there, or move it away"
        )


def _cannot_build(header: GgufHeader, problem: str) -> FileError:
    return FileError(
        f"{header.file}: its tokenizer {problem}. Put tokenizer.json of the model (it is beside "
        "its safetensors) into the folder of the file"
    )


def _byte_level(values: _Values, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = values.get("pre", None)
    if not isinstance(name, str) or name not in PATTERNS:
        hint = suggest(str(name), PATTERNS, otherwise=";")
        raise _cannot_build(
            values.header,
            f"splits words by the rule {short_repr(name)}{hint} known are {', '.join(PATTERNS)}",
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = _listed_merges(values, vocabulary)
    with values.refused("tokens"):
        bpe = models.BPE(vocabulary, pairs, ignore_merges=name in _WHOLE_WORDS)
    backend = tokenizers.Tokenizer(bpe)
    steps: list[Any] = [pre_tokenizers.Split(Regex(x), "isolated") for x in PATTERNS[name]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if name in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    values: _Values, tokens: Sequence[str], *, by_merges: bool
) -> tokenizers.Tokenizer:
    types = values.numbers("token_type", len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = (
        _listed_merges(values, vocabulary)
        if by_merges
        else _merges(vocabulary, values.numbers("scores", len(tokens)))
    )
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None
    )
    with values.refused("tokens"):
        bpe = models.BPE(
            vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types
        )
    backend = tokenizers.Tokenizer(bpe)
    prefix = values.get("add_space_prefix", True) is True
    space = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
    )
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _unigram(values: _Values, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer that finds the most likely pieces, as of XLM-RoBERTa."""
    scores = values.numbers("scores", len(tokens))
    types = values.numbers("token_type", len(tokens))
    if UNKNOWN not in types:
        raise values.invalid("token_type", f"has no token of type {UNKNOWN}, for unknown letters")
    if (longest := max(map(len, tokens))) > MAX_PIECE_LENGTH:
        raise values.invalid(
            "tokens", f"has a token of {longest} characters; {MAX_PIECE_LENGTH} are the most"
        )
    pieces = [(token, float(score)) for token, score in zip(tokens, scores, strict=True)]
    unknown, fallback = types.index(UNKNOWN), BYTE in types
    steps: list[Any] = []
    with values.refused("tokens"):
        backend = tokenizers.Tokenizer(models.Unigram(pieces, unknown, byte_fallback=fallback))
        if table := values.get("precompiled_charsmap", None):
            steps.append(normalizers.Precompiled(bytes(_bytes(table))))
    if values.get("remove_extra_whitespaces", False) is True:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if values.get("add_space_prefix", True) is True else "never"
    spaces = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    backend.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return backend


def _bytes(table: MetadataValue) -> list[int]:
    """Return the numbers of a table of bytes, which some writers store as signed."""
    if not isinstance(table, list):
        raise ValueError("precompiled_charsmap is no list")
    return [x % 256 for x in table if type(x) is int]


def _word_pieces(values: _Values, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer: in the file, a piece that begins a word has a mark, and others have
    lost their ##.
    """
    special = [x for x in tokens if x.startswith("[") and x.endswith("]")]
    unknown = "[UNK]"
    if missing := {"[CLS]", "[SEP]", unknown} - {*special}:
        raise values.invalid("tokens", f"lacks {', '.join(sorted(missing))}")
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        piece = token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"
        vocabulary[token if token in special else piece] = i
    if len(vocabulary) < len(tokens):
        raise values.invalid("tokens", "has a piece twice")
    lowercase = values.get("normalizer.lowercase", True) is not False
    with values.refused("tokens"):
        backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    named = ("[PAD]", unknown, "[CLS]", "[SEP]", "[MASK]")
    backend.add_special_tokens(
        [AddedToken(x, special=True, normalized=False) for x in named if x in vocabulary]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(x, vocabulary[x]) for x in ("[CLS]", "[SEP]")],
    )
    return backend


def _listed_merges(values: _Values, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that the file lists."""
    pairs: list[tuple[str, str]] = []
    for merge in values.texts("merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise values.invalid("merges", f"has {short_repr(merge)}, which are not two tokens")
        pairs.append((left, right))
    return pairs


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces whose joined piece exists, the best score first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, i in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                pair = (left, right)
                ranked.append((-scores[i], vocabulary[left], vocabulary[right], pair))
    return [pair for *_, pair in sorted(ranked)]


def _added(
    tokens: Sequence[str], types: Sequence[int], kind: int, *, special: bool
) -> list[AddedToken]:
    """Return the tokens of a type, which are matched as a whole where they are asked for."""
    return [
        AddedToken(token, special=special, normalized=False)
        for token, its_kind in zip(tokens, types, strict=True)
        if its_kind == kind and token
    ]


def _add_template(
    values: _Values,
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    *,
    has_start: bool,
    has_end: bool,
) -> None:
    """Add the tokens that the file puts around a text."""
    parts: dict[str, str] = {}
    ids: dict[str, int] = {}
    for key, other, wanted in (("bos", "cls", has_start), ("eos", "seperator", has_end)):
        index = values.token_id(f"{key}_token_id", len(tokens))
        if index is None:  # encoders name theirs otherwise
            index = values.token_id(f"{other}_token_id", len(tokens))
        if values.get(f"add_{key}_token", wanted) is True and index is not None:
            parts[key], ids[tokens[index]] = f"{tokens[index]}:0", index
    if parts:
        template = [parts.get("bos"), "$A:0", parts.get("eos")]
        with values.refused("bos_token_id", "is"):
            backend.post_processor = processors.TemplateProcessing(
                single=[part for part in template if part is not None],
                special_tokens=list(ids.items()),
            )
