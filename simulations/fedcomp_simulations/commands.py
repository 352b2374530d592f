"""The commands behind `fedcomp`. Those that train import torch and Flower only once they are called."""

import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console

import fedcomp
from fedcomp import wire
from fedcomp.codec import aliases, codec_fields
from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations.bench.inputs import load as load_input
from fedcomp_simulations.bench.measure import Row, measure, typical
from fedcomp_simulations.cli import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_MISTAKE
from fedcomp_simulations.config import one_of
from fedcomp_simulations.experiment import Experiment, with_codecs
from fedcomp_simulations.results import Results
from fedcomp_simulations.saving import naming, save
from fedcomp_simulations.study import load_experiment, load_study, study_of
from fedcomp_simulations.tables import table

if TYPE_CHECKING:
    from fedcomp_simulations.bench.server import ServerRow
    from fedcomp_simulations.bench.wire import WireRow

MAX_SEEDS = 1000
NARROW = 110
PLAIN_WIDTH = 140  # of a table that goes to a file or pipe
DEFAULT_EXPERIMENT = "mnist-mlp"

app = typer.Typer(add_completion=False, help="Compressed uploads for federated learning with Flower.")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; mistakes of the user become one line on stderr."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="fedcomp", standalone_mode=False)
    except click.ClickException as error:
        return _say(error.format_message(), EXIT_MISTAKE)
    except click.Abort:  # Ctrl-C in older versions of typer; newer ones return the code themselves
        return EXIT_INTERRUPTED
    except FedcompError as error:
        return _say(str(error), EXIT_MISTAKE)
    except BrokenPipeError:  # whoever read our output has enough; what is saved is saved
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return EXIT_ERROR
    except OSError as error:
        return _say(str(error), EXIT_ERROR)
    return code if isinstance(code, int) else 0


def _say(message: str, code: int) -> int:
    print(f"fedcomp: {' '.join(message.split())}", file=sys.stderr)
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedcomp {fedcomp.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del show_version
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def simulate(
    name: Annotated[str, typer.Argument(metavar="EXPERIMENT")] = DEFAULT_EXPERIMENT,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file too.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results and report; default results/<experiment>.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Train for this many rounds.")] = None,
    seeds: Annotated[str | None, typer.Option(help='A count, as in "3", or a list, as in "0,4,7" or "7,".')] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(help='Compare this codec instead; repeatable; "sign+ef" adds error feedback.'),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the experiment; repeatable.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE", help="Run with each of these values; repeatable for combinations."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; default 2, or 1 on one processor.")] = None,
    monitor: Annotated[bool, typer.Option("--monitor", help="Show what compression does to each tensor.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make all runs again, those in the folder too.")] = False,
    engine: Annotated[
        str, typer.Option(help="inprocess; ray: Flower's simulation; deployment: SuperNodes on loopback.")
    ] = "inprocess",
) -> None:
    """Measure which accuracy each codec reaches for how many uploaded bytes.

    EXPERIMENT is the name of a shipped experiment or the path of a TOML file. Every run is kept in the folder as soon
    as it has ended: after an interruption the same command goes on.
    """
    study = load_study(name, changes or (), grid or ()).map(lambda each: _adapt(each, rounds, seeds, codec))
    _check_workers(workers)
    from fedcomp_simulations import engines, simulating

    one_of("engine", engine, engines.ENGINES)
    if engine != engines.INPROCESS and (monitor or (workers or 1) > 1):
        raise ConfigError(f"--engine {engine}: cannot be combined with --monitor or --workers")
    folder = out or Path("results", study.name)
    _probe_folder(folder)
    if json_file is not None:
        _probe_file(json_file)
    for name in ("results.json", "accuracy.png", "report.html"):
        _probe_file(folder / name, "--out")
    results = simulating.run(study, workers, monitor=monitor, folder=folder, fresh=fresh, engine=engine)
    simulating.write(results, folder, json_file, _console())


@app.command()
def advise(
    budget: Annotated[
        list[str], typer.Option(help='Bytes of an upload, as in "640 B", "0.1 bits", "30 s at 20 kbit/s"; repeatable.')
    ],
    name: Annotated[str, typer.Option("--experiment", help="The task: as of simulate.")] = DEFAULT_EXPERIMENT,
    rounds: Annotated[int | None, typer.Option(help="Train for this many rounds.")] = None,
    seeds: Annotated[str | None, typer.Option(help='A count, as in "3", or a list, as in "0,4,7" or "7,".')] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; default 2, or 1 on one processor.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results and advice to this file.")] = None,
) -> None:
    """Try a handful of settings on a task, and print the line for a server.

    Of the experiment only the task counts, not its methods.
    """
    from fedcomp_simulations.advise import trial

    chosen = trial(_adapt(load_experiment(name), rounds, seeds, None), budget)
    _check_workers(workers)
    if json_file is not None:
        _probe_file(json_file)
    for note in chosen.notes:
        print(f"fedcomp: note: {note}", file=sys.stderr)
    from fedcomp_simulations import simulating

    _show_advice(simulating.run(study_of(chosen.experiment), workers), chosen.budgets, json_file)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Holds results.json, or folders that do.")],
    target: Annotated[
        str | None,
        typer.Option(help='Accuracy to reach: 0.85, or a share of float32\'s such as "95 %", the default.'),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default DIR.")] = None,
) -> None:
    """Write report.html, one page that explains the results in DIR, and its figures as PNGs."""
    from fedcomp_simulations.report import write_report

    print(f"report: {write_report(folder, target, out)}")


def _show_advice(results: Results, budgets: Sequence[str], json_file: Path | None) -> None:
    """Save first, then show, as after `simulate`."""
    from fedcomp_simulations.advise import advise, front, seeds_in_words

    best, advices = front(results), advise(results, budgets)
    content = results.to_json(seconds=True) | {
        "front": [method.name for method in best],
        "advice": [advice.to_json() for advice in advices],
    }
    failure = save(json.dumps(content, indent=1) + "\n", json_file) if json_file is not None else ""
    console = _console()
    console.print(table(results, narrow=console.width < NARROW, front=best))
    lines = [seeds_in_words(results)]
    for advice in advices:
        lines += ["", f"Recommended for {advice.budget}:", *filter(None, [advice.line]), *advice.words]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    if failure:
        raise OSError(failure)


def _check_workers(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {workers}")


def _adapt(experiment: Experiment, rounds: int | None, seeds: str | None, codecs: list[str] | None) -> Experiment:
    """Apply the options that replace a part of the experiment."""
    if rounds is not None:
        experiment = replace(experiment, rounds=rounds)
    if seeds is not None:
        experiment = replace(experiment, seeds=_parse_seeds(seeds))
    return with_codecs(experiment, codecs) if codecs else experiment


def _parse_seeds(text: str) -> tuple[int, ...]:
    """The numbers 0, 1, ... as many as a count says, or those of a list; "7," is the list of 7 alone."""
    try:
        numbers = tuple(int(part) for part in text.strip().removesuffix(",").split(","))
    except ValueError:
        raise ConfigError(f'--seeds: expected a count such as "3" or a list "0,4,7" or "7,", got {text!r}') from None
    if "," in text:
        return numbers
    if numbers[0] > MAX_SEEDS:
        raise ConfigError(f"--seeds: expected a count of at most {MAX_SEEDS}, got {text}")
    return tuple(range(numbers[0]))


def _probe_folder(folder: Path) -> None:
    """Find out before the run, not after it, that results cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out: cannot write into {folder}: {error.strerror}") from error


def _probe_file(path: Path, option: str = "--json") -> None:
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from error


def _console() -> Console:
    """Make a console for stdout that has room for a table when there is no terminal to ask for its width."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old terminal shows question marks for lines, not a traceback
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


@app.command()
def bench(
    codec: Annotated[list[str] | None, typer.Option(help="Measure this codec only; repeatable.")] = None,
    given: Annotated[
        list[str] | None, typer.Option("--input", help="gauss, laplace, student, update-... or FILE.npy; repeatable.")
    ] = None,
    size: Annotated[int, typer.Option("--n", help="Values of the synthetic inputs.")] = 1_000_000,
    peers: Annotated[bool, typer.Option(help="Measure installed peers too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the rate-distortion plot, a PNG, to this file.")] = None,
    server: Annotated[bool, typer.Option("--server", help="Measure averaging at the server instead.")] = False,
    clients: Annotated[int, typer.Option(help="With --server: replies to average.")] = 200,
    device: Annotated[str, typer.Option(help="With --server: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    on_wire: Annotated[bool, typer.Option("--wire", help="Measure all bytes of real uploads instead.")] = False,
) -> None:
    """Measure bits, error and speed of every codec through real frames, on one core.

    Without --codec: every registered codec in a typical setting. Inputs: gauss (the default), laplace, student,
    update-mlp, update-cnn, update-rnn, or a .npy file.

    With --server: time and memory from the frames of many clients to their mean, against Flower's own mean of
    uncompressed models in the same run.

    With --wire: what a round costs a client's link, Flower's requests included, for a model of 60 small tensors: on a
    SuperLink and a SuperNode on loopback, in about four minutes. --codec, once at most, names the uplink.
    """
    if size < 1:
        raise ConfigError(f"--n: expected at least 1, got {size}")
    for option, path in {"--json": json_file, "--plot": plot}.items():
        if path is not None:
            _probe_file(path, option)
    if on_wire:
        if server or given or peers or plot is not None:
            raise ConfigError("--wire: cannot be combined with --server, --input, --peers or --plot")
        _write_rows(_bench_wire(codec or ["int8"]), json_file)
        return
    if server:
        if given or peers or plot is not None:
            raise ConfigError("--server: cannot be combined with --input, --peers or --plot")
        _write_rows(_bench_server(codec, clients, size, device), json_file)
        return
    chosen = [fedcomp.parse_codec(text) for text in codec] if codec else typical()
    rows = _bench(chosen, given or ["gauss"], size, peers)
    _write_rows(rows, json_file)
    if plot is not None:
        from fedcomp_simulations.bench.show import save_plot

        with naming(plot):
            save_plot(rows, plot)


def _write_rows(rows: "list[Row] | list[ServerRow] | list[WireRow]", json_file: Path | None) -> None:
    if json_file is not None:
        failure = save(json.dumps([row.to_json() for row in rows], indent=1) + "\n", json_file)
        if failure:
            raise OSError(failure)


def _bench_server(codec: list[str] | None, clients: int, parameters: int, device: str) -> "list[ServerRow]":
    from fedcomp_simulations.bench.server import TYPICAL, measure_server
    from fedcomp_simulations.bench.show import server_table

    if clients < 1:
        raise ConfigError(f"--clients: expected at least 1, got {clients}")
    chosen = [fedcomp.parse_codec(text) for text in codec or TYPICAL]
    rows = [measure_server(each, clients, parameters, device) for each in chosen]
    _console().print(server_table(rows))
    return rows


def _bench_wire(codecs: list[str]) -> "list[WireRow]":
    from fedcomp_simulations.bench.show import wire_table
    from fedcomp_simulations.bench.wire import measure_wire, settings

    if len(codecs) > 1:
        raise ConfigError(f"--codec: expected one with --wire, got {len(codecs)}")
    fedcomp.parse_codec(codecs[0])
    rows = measure_wire(
        settings(codecs[0]),
        lambda row: print(f"fedcomp: {row.method}: {row.bytes_up:,} bytes up", file=sys.stderr),
    )
    _console().print(wire_table(rows))
    return rows


def _bench(codecs: list[fedcomp.Codec], inputs: list[str], size: int, with_peers: bool) -> list[Row]:
    """Measure everything, showing a table as soon as an input is done."""
    from fedcomp_simulations.bench.peers import measure_peers
    from fedcomp_simulations.bench.show import table as sheet

    every: list[Row] = []
    for given in [load_input(name, size) for name in inputs]:
        rows = [measure(codec, given) for codec in codecs]
        if with_peers:
            rows += measure_peers(given, lambda note: print(f"fedcomp: note: {note}", file=sys.stderr))
        _console().print(sheet(rows))
        every += rows
    return every


@app.command()
def deploy(
    bundle: Annotated[Path, typer.Argument(help="Folder of the bundle that the clients have trained.")],
    parameters: Annotated[Path, typer.Option(help="The trained model: a .npz file with its arrays by tensor name.")],
    out: Annotated[Path, typer.Option(help="Folder for the models.")],
    calibration_x: Annotated[Path | None, typer.Option(help="Some hundred inputs, .npy, for static int8.")] = None,
    test_x: Annotated[Path | None, typer.Option(help="Inputs to test with, a .npy file.")] = None,
    test_y: Annotated[Path | None, typer.Option(help="Their labels or targets, a .npy file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the comparison to this file.")] = None,
) -> None:
    """Make a trained model ready for devices: float32 and int8 ONNX, compared by bytes, accuracy and latency."""
    from fedcomp_simulations.deploying import deploy_files

    if json_file is not None:
        _probe_file(json_file)
    report = deploy_files(bundle, parameters, out, calibration_x, test_x, test_y)
    print(report)
    print(f"models: {report.folder}")
    if json_file is not None and (failure := save(json.dumps(report.to_json(), indent=1) + "\n", json_file)):
        raise OSError(failure)


@app.command()
def codecs() -> None:
    """List the codecs and their parameters."""
    lines = {short: f"short for {text}" for short, text in aliases().items()}
    for name, kind in fedcomp.registered().items():
        parameters = ", ".join(_parameter(entry) for entry in codec_fields(kind))
        lines[f"{name}({parameters})"] = (kind.__doc__ or "").strip().partition("\n")[0]
    width = max(map(len, lines))
    for call, summary in lines.items():
        print(f"{call:{width}}  {summary}")


def _parameter(entry: Field[Any]) -> str:
    if entry.default is MISSING:
        return entry.name
    text = repr(entry.default) if isinstance(entry.default, str) else str(entry.default)
    return f"{entry.name}={text}"


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODULE:MODEL", help="A torch module, or what makes one.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle.")],
    loss: Annotated[str, typer.Option(help="cross_entropy, mse, smooth_l1 or module:loss.")] = "cross_entropy",
    example: Annotated[str | None, typer.Option(help="module:example, a pair of tensors x and y.")] = None,
    x_shape: Annotated[str | None, typer.Option(help='Instead: the shape of one sample, as in "1x28x28".')] = None,
    tokens: Annotated[int | None, typer.Option(help="With --x-shape: x are whole numbers below this.")] = None,
    momentum: Annotated[float, typer.Option(help="Of SGD on the device.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Of SGD on the device.")] = 0.0,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Of SGD on the device.")] = False,
    check: Annotated[bool, typer.Option(help="Compare steps with torch before anything is written.")] = True,
) -> None:
    """Export a torch model and its loss as a bundle that devices train from without torch."""
    try:
        from fedcomp_simulations import exporting
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch"):
            raise
        raise ConfigError(f'{error.name} is not installed; run: pip install "fedcomp[export,simulation]"') from error
    from fedcomp_clients.manifest import SGD

    made = exporting.export(
        model, out, loss=loss, example=example, x_shape=x_shape, tokens=tokens, check=check,
        optimizer=SGD(momentum, weight_decay, nesterov),
    )  # fmt: skip
    manifest = made.manifest
    size = sum(file.bytes for file in manifest.files.values())
    found = manifest.check
    compared = f"differs from torch by {found.largest_difference:.1e} at most" if found else "not compared with torch"
    if manifest.random and check:
        compared = "compared with torch without dropout"
    print(f"{made.folder}: {len(manifest.tensors)} tensors, {made.nodes} operators, {size:,} bytes; {compared}")


@app.command()
def inspect(frame: Annotated[Path, typer.Argument()]) -> None:
    """Describe an encoded upload, a file that holds one frame, without decoding it."""
    try:
        data = frame.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {frame}: {error.strerror}") from error
    description: dict[str, Any] = wire.inspect(data)
    print(json.dumps(description, indent=1))
