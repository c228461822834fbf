"""Print the tables of docs/scale.md: memory, communication and speed on 1, 8 and 64 GPUs.

    python -m tools.scale

Memory is folio.memory's estimate. Times are computed from data sheets, not measured.
"""

from dataclasses import dataclass, replace

from folio import process
from folio.settings import load, parse_arguments


@dataclass(frozen=True)
class ScaleConfig:
    """Print memory, communication and speed of GPT-2's sizes on 1, 8 and 64 GPUs."""


if __name__ == "__main__":  # --help must not wait for torch
    process.start(parse_arguments, ScaleConfig)

from folio.device import DTYPES
from folio.memory import estimate
from folio.size import flops_per_token, num_params
from model import GPTConfig
from tools.table import aligned
from train import TrainConfig

MODELS = {  # GPT-2's four sizes (Radford et al. 2019)
    "124M": GPTConfig(bias=False),
    "355M": GPTConfig(bias=False, n_layer=24, n_head=16, n_embd=1024),
    "774M": GPTConfig(bias=False, n_layer=36, n_head=20, n_embd=1280),
    "1.5B": GPTConfig(bias=False, n_layer=48, n_head=25, n_embd=1600),
}
GPUS = (1, 8, 64)
SEQUENCES = 512  # per step: 524,288 tokens
PEAK = 989e12  # FLOP/s of an H100 SXM, dense, bfloat16
MFU = 0.33  # fraction of PEAK that training reaches
GPU_BYTES = 80e9
USED = 0.85  # of GPU_BYTES; the rest is for the CUDA context, NCCL and fragmentation
GPUS_PER_NODE = 8
NVLINK = 450e9  # bytes/s that a GPU sends to the others of its node
NETWORK = 50e9  # bytes/s that a GPU sends to other nodes: 400 Gb/s


def main(argv=None):
    load(ScaleConfig, argv)
    print_table(speed_rows(), ("model", "GPUs", "micro-batch", "micro-batches", "memory, GiB",
                "sent, GB", "compute, ms", "communication, ms", "tokens/s"))  # fmt: skip
    print_table(choice_rows(), ("model", "setting on 8 GPUs", "state, GiB", "largest micro-batch",
                "sent, GB, 1 micro-batch", "sent, GB, 8 micro-batches"))  # fmt: skip


def print_table(rows, heading):
    print("", *aligned([list(heading), *rows]), sep="\n")


def speed_rows():
    """Returns the rows about a step of each model with DDP, with the largest micro-batch."""
    rows = []
    for name, config in MODELS.items():
        for gpus in GPUS:
            size = largest_micro_batch(config, gpus)
            micro_batches = SEQUENCES // gpus // size
            sent = sent_bytes(config, "ddp", gpus, micro_batches)
            compute = compute_seconds(config, gpus)
            communication = sent / bandwidth(gpus)
            tokens = SEQUENCES * config.block_size
            memory = estimate(config, settings_of("ddp", gpus, size), gpus).total
            # The slowest case: communication starts when all gradients are ready.
            speed = f"{tokens / (compute + communication):,.0f}"
            times = [f"{1e3 * seconds:,.1f}" for seconds in (compute, communication)]
            rows.append([name, str(gpus), str(size), str(micro_batches), f"{memory / 2**30:.1f}",
                         f"{sent / 1e9:.2f}", *times, speed])  # fmt: skip
    return rows


def choice_rows():
    """Returns the rows that compare DDP, FSDP and activation checkpointing on one node."""
    rows, gpus = [], GPUS_PER_NODE
    for name, config in MODELS.items():
        for parallel, recomputes in (("ddp", False), ("fsdp", False), ("fsdp", True)):
            settings = settings_of(parallel, gpus, SEQUENCES // gpus)
            found = estimate(config, settings, gpus)
            state = found.weights + found.gradients + found.optimizer
            size = largest_micro_batch(config, gpus, parallel, recomputes, gpus * SEQUENCES)
            sent = [sent_bytes(config, parallel, gpus, n) for n in (1, 8)]
            setting = f"{parallel}, checkpointing" if recomputes else parallel
            rows.append([name, setting, f"{state / 2**30:.1f}", str(size),
                         *(f"{each / 1e9:.2f}" for each in sent)])  # fmt: skip
    return rows


def settings_of(parallel, gpus, micro_batch, recomputes=False, sequences=SEQUENCES):
    """Returns the TrainConfig of a compiled run in bfloat16."""
    return TrainConfig(
        device="cuda",
        dtype="bfloat16",
        compile=True,
        parallel=parallel,
        activation_checkpointing=recomputes,
        batch_size=micro_batch,
        gradient_accumulation_steps=sequences // micro_batch,  # of all processes
    )


def largest_micro_batch(config, gpus, parallel="ddp", recomputes=False, sequences=SEQUENCES):
    """Returns the largest power of two of sequences that fits, 0 if none does.

    `sequences` is the number per step on all GPUs.
    """
    size = sequences // gpus
    while size:
        settings = settings_of(parallel, gpus, size, recomputes, sequences)
        if estimate(config, settings, gpus).total <= USED * GPU_BYTES:
            break
        size //= 2
    return size


def sent_bytes(config, parallel, gpus, micro_batches):
    """Returns the bytes that each process sends in a step of `micro_batches` per process.

    Each ring collective of N processes sends (N - 1) / N of its data: a reduce-scatter, an
    all-gather, or both one after the other, which is an all-reduce (Patarasuk and Yuan 2009).
    """
    gradients = 4 * num_params(config)
    if parallel == "ddp":
        data = 2 * gradients
    else:
        root = num_params(replace(config, n_layer=0))  # is gathered once per micro-batch
        blocks = num_params(config) - root  # forward and again backward
        item = DTYPES["bfloat16"].itemsize
        data = micro_batches * item * (root + 2 * blocks) + gradients
    return data * (gpus - 1) / gpus


def compute_seconds(config, gpus):
    """Returns the time of the matrix products of a step at the assumed MFU."""
    return SEQUENCES * config.block_size * flops_per_token(config) / (gpus * PEAK * MFU)


def bandwidth(gpus):
    """Returns the bytes/s of a ring that NCCL divides over the links of all GPUs of a node."""
    return NVLINK if gpus <= GPUS_PER_NODE else min(NVLINK, GPUS_PER_NODE * NETWORK)


if __name__ == "__main__":
    process.run(main)
