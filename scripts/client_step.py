"""One training step and one upload with nothing but the client installed: what check_client.sh runs. Takes a bundle."""

import sys
import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict

import fedcomp
import fedcomp_clients
from fedcomp import Plan, parse_codec
from fedcomp.request import KEY, STYPE, Request
from fedcomp_clients import OnnxTrainer, make_client_app
from fedcomp_clients.app import initial_arrays

SAMPLES = 32
FORBIDDEN = ("torch", "onnx", "fedcomp_strategies", "fedcomp_simulations")


def main(bundle: str) -> None:
    """Train, upload, and look at what that took."""
    trainer = OnnxTrainer(bundle)
    data = noise(trainer)
    start = trainer.evaluate(*data).loss
    result = trainer.fit(*data, batch_size=SAMPLES, lr=0.01)
    print(
        f"step: loss {start:.4f} -> {trainer.evaluate(*data).loss:.4f} after {result.steps} step of {SAMPLES} samples"
    )
    app = make_client_app(bundle, lambda context: data)
    reply = app(request(initial_arrays(bundle)), Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
    if reply.has_error():
        sys.exit(f"the client answered: {reply.error.reason}")
    frames = [array for record in reply.content.array_records.values() for array in record.values()]
    if [array.stype for array in frames] != [STYPE]:
        sys.exit(f"expected one frame, got arrays of {sorted({array.stype for array in frames})}")
    whole = sum(values.nbytes for values in trainer.get_parameters().values())
    print(f"upload: {len(frames[0].data):,} bytes for {whole:,} bytes of tensors")
    loaded = [name for name in FORBIDDEN if name in sys.modules]
    if loaded:
        sys.exit(f"{', '.join(loaded)} was imported")
    print(f"fedcomp {fedcomp.__version__} at {fedcomp_clients.__path__[0]}; no torch, no onnx")


def noise(trainer: OnnxTrainer) -> tuple[np.ndarray, np.ndarray]:
    """Data that the model takes."""
    rng, manifest = np.random.default_rng(0), trainer.manifest
    x = rng.normal(size=(SAMPLES, *manifest.x.shape)).astype(manifest.x.dtype)
    return x, rng.integers(0, manifest.classes or 2, (SAMPLES, *manifest.y.shape)).astype(manifest.y.dtype)


def request(arrays: ArrayRecord) -> Message:
    """What a server sends that asks for int8."""
    wanted = Request(Plan(parse_codec("int8")), 1).to_text()
    config = ConfigRecord({KEY: wanted, "server-round": 1, "lr": 0.01, "batch-size": SAMPLES})
    now = time.time()
    told = Metadata(1, "1", 0, 1, "", "", created_at=now, ttl=3600, message_type="train")
    return Message(RecordDict({"arrays": arrays, "config": config}), metadata=told)


if __name__ == "__main__":
    main(sys.argv[1])
