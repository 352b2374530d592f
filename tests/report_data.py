"""Results as a simulation leaves them, made up: curves that rise, links with bytes, some clients lost."""

import json
from dataclasses import replace
from pathlib import Path

from fedcomp_simulations.experiment import Method
from fedcomp_simulations.results import ByRound, Exchange, Results, RunResult, Task

FLOAT32 = Method("float32", "float32")
SIGN = Method("sign + EF", "sign", "ef")
AUTO = Method("auto 60 B", "auto", "auto", budget="60 B")
TOPK = Method("top-k", "topk(0.01)", "ef")

FULL = 4000
"""Bytes of a download, and of an upload of float32."""

FINAL = {FLOAT32: (0.90, FULL), SIGN: (0.89, 200), AUTO: (0.86, 50), TOPK: (0.60, 100)}
"""By method: final accuracy of seed 0, one point less for each seed more, and bytes of an upload."""

CLIENTS, REQUESTS, OVERHEAD = 2, 9, 1000
SETTINGS = {"dataset": "mnist", "model": "mlp", "alpha": 0.3, "fleet": {"link": "nb-iot", "dropout": 0.05}}
VERSIONS = {"fedcomp": "0.1.0", "python": "3.11.7"}


def make_run(
    method: Method, seed: int = 0, rounds: int = 12, *, final: float | None = None, per_upload: int | None = None,
    outcome: str = "ok", task: str = "", warnings: tuple[str, ...] = (),
) -> RunResult:  # fmt: skip
    """A run that is at its final accuracy from a third of its rounds on; `outcome` is that of client 0 in round 1."""
    accuracy, size = FINAL.get(method, (0.8, 100))
    accuracy = (accuracy if final is None else final) - 0.01 * seed
    size = size if per_upload is None else per_upload
    up, down = (size + OVERHEAD) * (size > 0), FULL + OVERHEAD
    numbers = tuple(range(1, rounds + 1))
    return RunResult(
        method=method,
        seed=seed,
        rounds=rounds,
        accuracy_curve=tuple((n, n * CLIENTS * size, accuracy * min(1.0, n / (rounds / 3))) for n in numbers),
        payload_bytes_up=rounds * CLIENTS * size,
        payload_bytes_down=rounds * CLIENTS * FULL,
        uploads=rounds * CLIENTS * (size > 0),
        failures=int(outcome != "ok"),
        seconds=0.0,
        warnings=warnings,
        messages=rounds * CLIENTS,
        last=4,
        task=task,
        by_round=ByRound(
            round=numbers,
            payload_up=(CLIENTS * size,) * rounds,
            payload_down=(CLIENTS * FULL,) * rounds,
            wire_up=(CLIENTS * up,) * rounds,
            wire_down=(CLIENTS * down,) * rounds,
            failures=(int(outcome != "ok"),) + (0,) * (rounds - 1),
            nmse=(None,) * rounds if method.codec == "float32" else tuple(0.5 / n for n in numbers),
            residual=tuple(1.0 + 0.1 * n for n in numbers) if method.feedback == "ef" else (None,) * rounds,
        ),
        exchanges=tuple(
            tuple(
                Exchange(client, up, down, REQUESTS, outcome if client == 0 and n == 1 else "ok")
                for client in range(CLIENTS)
            )
            for n in numbers
        ),
    )


def make_results(*runs: RunResult, experiment: str = "mnist-mlp", tasks: tuple[Task, ...] = ()) -> Results:
    """The results of these runs; one task unless there are others."""
    tasks = tasks or (Task("", 1000, 20, CLIENTS, settings=SETTINGS),)
    return Results.of(experiment, tasks, runs, "inprocess", VERSIONS)


def four_methods(seeds: int = 2) -> Results:
    """Four methods, all seeds, and a reply that came late."""
    runs = [make_run(method, seed) for method in FINAL for seed in range(seeds)]
    return make_results(*[make_run(SIGN, 0, outcome="late") if (r.method, r.seed) == (SIGN, 0) else r for r in runs])


def grid_of(*alphas: float) -> Results:
    """A grid over alpha with two methods and one seed."""
    tasks = [replace(make_results().tasks[0], name=f"alpha={alpha:g}", grid={"alpha": alpha}) for alpha in alphas]
    runs = [
        bare(make_run(method, task=task.name, final=0.7 + 0.1 * task.grid["alpha"]))
        for task in tasks
        for method in (FLOAT32, SIGN)
    ]
    return make_results(*runs, tasks=tuple(tasks))


def bare(run: RunResult) -> RunResult:
    """The run without what happened in each round, as an engine may leave it: fewer figures."""
    return replace(run, by_round=ByRound(), exchanges=())


def save_results(results: Results, folder: Path) -> Path:
    """Write results.json into a folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results.to_json()))
    return folder
