"""The command `regard view`, which serves the attention of a model or of a recording to a browser
on this machine.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard import units
from regard.cli.options import (
    LANG,
    TEXT_FILE,
    LoadOptions,
    PromptOptions,
    argument,
    check_files,
    grouped,
    load,
    note,
    option,
    progress_bar,
    refuse_given,
    usage_error,
    working,
)
from regard.language import counted, translate
from regard.untrusted_text import escape_controls, short_repr

if TYPE_CHECKING:
    from regard.inspect import Recording
    from regard.inspect.tile_server.running import RunningRecording
    from regard.inspect.tile_server.serve import Server

EPILOG = "For example: regard view tiny --file long.txt, or regard view run.safetensors"
record_option = partial(option, panel="What to record")
server_option = partial(option, panel="The server")


@grouped
def view(
    of: str = argument(
        'A file that regard.inspect.save wrote, or a model: "tiny", a folder, or org/name.',
        default=...,
        metavar="RECORDING|MODEL",
    ),
    text: str | None = argument("The text, for a model.", shown="that of --file"),
    file: str | None = TEXT_FILE,
    layer: list[int] | None = record_option(
        "Record this layer. Repeatable.", "--layer", shown="all"
    ),
    head: list[int] | None = record_option(
        "Record this query head of each layer. Repeatable.", "--head", shown="all"
    ),
    save: Path | None = record_option("Also write the recording to this .safetensors file."),
    beside: Path | None = server_option(
        "A second recording: its heads are shown too, beside or minus those of the first."
    ),
    memory: float = record_option("GiB that recorded queries and keys may take.", default=4.0),
    port: int = server_option("Port of the server; 0 is a free one.", default=0, min=0, max=65535),
    host: str = server_option("Address to listen on.", default="127.0.0.1"),
    allow_remote: bool = server_option(
        "Allow an address that other machines can reach; nothing is encrypted.",
        "--allow-remote",
        default=False,
    ),
    open_browser: bool = server_option("Open the link in the browser.", "--open", default=False),
    lang: str | None = LANG,
    *,
    reading: PromptOptions,
    load_options: LoadOptions,
) -> None:
    """Look at exact attention of up to 131,072 tokens and more, in a browser on this machine.

    Every tile of a pattern is computed from the recorded queries, keys and row sums when you look
    at it; the page opens when the first layer has run. The server answers only requests with the
    token of the printed link. Ctrl-C ends it.
    """
    check_files({"--save": save})
    from regard.files.gguf_files import is_gguf
    from regard.inspect import load as load_recording
    from regard.inspect.tile_server.serve import require_server_packages

    require_server_packages()
    serving: dict[str, Any] = {"port": port, "host": host, "allow_remote": allow_remote}
    serving |= {"open_browser": open_browser, "lang": lang}
    if beside is not None:
        serving["b"] = load_recording(beside)
    running: RunningRecording | None = None
    if Path(of).is_file() and not is_gguf(Path(of)):
        if Path(of).suffix != ".safetensors":
            raise usage_error(
                "RECORDING|MODEL",
                "{of} is no .safetensors file, as recordings are; to look at a text, write regard "
                "view MODEL --file {of}",
                of=short_repr(of),
            )
        flags: dict[str, object] = {"TEXT": text, "--file": file, "--save": save}
        flags |= {"--layer": layer, "--head": head}
        flags |= dict.fromkeys([*reading.flags_given(), *load_options.flags_given()], True)
        refuse_given(flags, "applies to a model, but a recording was given; leave it out")
        server = _serve(load_recording(of), serving)
    elif Path(of).suffix == ".safetensors":
        raise usage_error("RECORDING|MODEL", "there is no recording {of}", of=short_repr(of))
    else:
        from regard.inspect.tile_server.running import RunningRecording

        prompt = reading.prompt(text, file)
        model = load(of, load_options)
        (words,) = reading.read(model, [prompt])
        _check_memory(model, words, layer, head, memory)
        size = len(words) if isinstance(words, str) else words.shape[-1]
        with working("running the model", size):
            running = RunningRecording(model, words, {"places": layer, "heads": head})
            server = _serve(running, serving)
    typer.echo(server.url)
    note("Ctrl-C ends the server.")
    try:
        if running is not None:
            with progress_bar() as show:
                recording = running.follow(partial(show, translate("running the model")))
            if save is not None:
                from regard.inspect import save as save_recording

                save_recording(recording, save)
                name, size = escape_controls(str(save)), units.size(save.stat().st_size)
                typer.echo(f"{name}: {size}", err=True)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def _serve(recording: Recording | RunningRecording, serving: dict[str, Any]) -> Server:
    """Start the server of a recording."""
    from regard.inspect import view as view_recording

    return view_recording(recording, **serving)


def _check_memory(
    model: object, text: Any, layers: list[int] | None, heads: list[int] | None, memory: float
) -> None:
    """Raise an error if q and k of the chosen heads surely take more memory than is allowed."""
    config, encode = getattr(model, "config", None), getattr(model, "encode", None)
    width = getattr(config, "hidden_size", 0) or getattr(config, "n_embd", 0)
    depth = getattr(config, "num_hidden_layers", 0) or getattr(config, "n_layer", 0)
    every = getattr(config, "num_attention_heads", 0) or getattr(config, "n_head", 0)
    if not (width and depth and every and encode):
        return
    tokens = len(text) if isinstance(text, str) else text.shape[-1]
    if tokens * width * depth * 8 <= memory * 2**30:
        return  # there are at most as many tokens as characters, or nearly so
    if isinstance(text, str):
        encoded = encode(text)
        tokens = (encoded if hasattr(encoded, "shape") else encoded.ids).shape[-1]
    share = (len(heads) / every if heads else 1) * (len(layers) / depth if layers else 1)
    needed = tokens * width * depth * 8 * share
    if needed > memory * 2**30:
        raise usage_error(
            None,
            "queries and keys of {tokens} take about {size}, and --memory allows {memory:g} GiB; "
            "choose heads with --layer and --head (every head is in the overview in any case), or "
            "raise --memory",
            tokens=counted(tokens, "token"),
            size=units.size(int(needed)),
            memory=memory,
        )
