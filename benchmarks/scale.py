"""The simulator of schedules beside published tables of large clusters: how near is it on paper?

A step takes ``a T + b``: ``T`` is the schedule's, simulated, ``a`` what a micro-batch takes, ``b`` the exchange of
replicas and the optimizer, as far as they stand outside of it. Each table is fitted on its first and its last row, and
judged on the rows between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from common import Record, parser, table, target

from lightning_smddp.pipeline.runtime.schedules import SCHEDULES, orders
from lightning_smddp.planner.simulator import Action, Kind, SimulatedStep, simulate

NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved_1f1b", "ZB-H1": "interleaved_zero_bubble"}


class Profile(NamedTuple):
    """A row of the tables of arXiv:2401.10241: A100, 1,024 tokens. Three values are of the schedules in ``NAMES``.

    ``samples`` are measured, for each device and second; ZB-H1's are those of ZB-1p, which has the same bubbles.
    """

    microbatches: int
    stage_us: tuple[int, int, int]  # a stage's forward, gradient of the input, gradient of the weights
    message_us: int
    bubbles: tuple[float, float, float]  # shares of a step
    samples: tuple[float, float, float]


ZERO_BUBBLE = {  # (model, ranks, chunks of a layer on each under 1F1B-I, rows of a micro-batch)
    ("1.5B", 8, 3, 6): [
        Profile(24, (18522, 18086, 9337), 601, (0.2431, 0.1055, 0.1585), (11.8, 13.1, 12.9)),
        Profile(32, (18513, 18086, 9331), 626, (0.1985, 0.0818, 0.1242), (12.5, 13.4, 13.4)),
        Profile(64, (18546, 18097, 9321), 762, (0.1240, 0.0443, 0.0674), (13.6, 13.9, 14.2)),
    ],
    ("6.2B", 8, 4, 3): [
        Profile(24, (29718, 29444, 19927), 527, (0.2347, 0.0808, 0.1323), (3.50, 4.01, 3.88)),
        Profile(32, (29802, 29428, 19530), 577, (0.1898, 0.0628, 0.1045), (3.70, 4.08, 4.00)),
        Profile(64, (29935, 29621, 19388), 535, (0.1091, 0.0320, 0.0554), (4.03, 4.19, 4.20)),
    ],
    ("14.6B", 16, 3, 1): [
        Profile(48, (11347, 11248, 8132), 377, (0.2552, 0.1104, 0.1397), (1.40, 1.54, 1.61)),
        Profile(64, (11307, 11254, 8101), 379, (0.2082, 0.0852, 0.1088), (1.49, 1.59, 1.67)),
        Profile(128, (11325, 11308, 8109), 378, (0.1251, 0.0445, 0.0576), (1.64, 1.66, 1.76)),
    ],
    ("28.3B", 32, 2, 1): [
        Profile(96, (10419, 10207, 7715), 408, (0.2646, 0.1493, 0.1421), (0.76, 0.82, 0.87)),
        Profile(128, (10408, 10204, 7703), 408, (0.2168, 0.1164, 0.1106), (0.80, 0.85, 0.90)),
        Profile(256, (10402, 10248, 7698), 460, (0.1352, 0.0624, 0.0594), (0.88, 0.90, 0.96)),
    ],
}
INTERLEAVED = ("1F1B-I", 8, 6, 64)  # schedule, ranks of a pipeline, stages on each, GPUs of a replica
MEGASCALE = "MegaScale (NSDI 2024), table 2: "
CLUSTERS = [  # source, pipelines as above, sequences of a step (a micro-batch is one), GPUs -> seconds of a step
    (MEGASCALE + "Megatron-LM, 768", INTERLEAVED, 768, {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9}),
    (MEGASCALE + "MegaScale, 768", INTERLEAVED, 768, {256: 32.0, 512: 16.5, 768: 11.5, 1024: 8.9}),
    (MEGASCALE + "Megatron-LM, 6144", INTERLEAVED, 6144, {3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57}),
    (MEGASCALE + "MegaScale, 6144", INTERLEAVED, 6144, {3072: 23.66, 6144: 12.21, 8192: 9.56, 12288: 6.34}),
    ("MT-NLG 530B (arXiv:2201.11990)", ("1F1B", 35, 1, 280), 1920, {2240: 60.1, 2800: 50.2, 3360: 44.4}),
]
LLAMA = {32: 430.0, 16: 400.0}
"""Llama 3 405B (arXiv:2407.21783v3), table 4, of 8,192 and 16,384 GPUs: micro-batches -> TFLOP/s of a GPU."""


def actions(schedule: str, ranks: int, chunks: int, microbatches: int) -> dict[int, list[Action]]:
    """What each rank does."""
    return orders(SCHEDULES[NAMES[schedule]], ranks, ranks * chunks, microbatches)


def step(schedule: str, ranks: int, chunks: int, profile: Profile) -> SimulatedStep:
    """A step of ``profile``, whose stage is cut into ``chunks``; in seconds."""
    forward, inputs, weights = (1e-6 * of_rank / chunks for of_rank in profile.stage_us)
    seconds: dict[Kind, float] = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    return simulate(actions(schedule, ranks, chunks, profile.microbatches), seconds, 1e-6 * profile.message_us)


def fitted(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """The factors of two terms: ``rows`` are two pairs of terms, and ``times`` what they come to."""
    factors: list[float] = torch.linalg.solve(torch.tensor(rows).double(), torch.tensor(times).double()).tolist()
    return factors


def zero_bubble(record: Record) -> None:
    """Bubbles, and samples per second."""
    bubble_rows, sample_rows = [], []
    differences, errors, wrong = [], [], []
    for (name, ranks, model_chunks, batch), profiles in ZERO_BUBBLE.items():
        terms: dict[tuple[int, str], list[float]] = {}  # simulated seconds, and messages of a rank
        measured: dict[tuple[int, str], float] = {}
        for profile in profiles:
            row = [f"{name}, {profile.microbatches}"]
            for schedule, bubble, rate in zip(NAMES, profile.bubbles, profile.samples, strict=True):
                chunks = model_chunks if schedule == "1F1B-I" else 1
                simulated = step(schedule, ranks, chunks, profile)
                row += [f"{bubble:.4f}", f"{1 - simulated.busy_share:.4f}"]
                differences += [abs(1 - simulated.busy_share - bubble)] if chunks == 1 else []
                terms[profile.microbatches, schedule] = [simulated.seconds, 2.0 * chunks * profile.microbatches]
                measured[profile.microbatches, schedule] = profile.microbatches * batch / (ranks * rate)
            bubble_rows.append(row)
        known = [next(iter(terms)), (profiles[-1].microbatches, "1F1B-I")]
        factor, message_s = fitted([terms[key] for key in known], [measured[key] for key in known])
        predicted = {key: factor * seconds + message_s * messages for key, (seconds, messages) in terms.items()}
        of_model = [predicted[key] / measured[key] - 1 for key in terms if key not in known]
        errors += of_model
        sample_rows.append([name, f"{factor:.3f}", f"{1e6 * message_s:.0f}", f"{100 * max(of_model, key=abs):+.1f} %"])
        pairs = [(one, other) for one in terms for other in terms if one[0] == other[0]]
        wrong += [
            measured[other] / measured[one] - 1
            for one, other in pairs
            if measured[one] < measured[other] and predicted[one] >= predicted[other]
        ]
    record.section(
        "Zero bubble (arXiv:2401.10241)",
        "Shares of a step in which ranks wait, by the paper's times of a stage. ZB-H1 is torch's interleaved zero "
        "bubble with one stage on a rank.",
        table(["model, micro-batches", *(f"{name}{of}" for name in NAMES for of in (", paper", ""))], bubble_rows),
        "Samples per second, measured by the paper: fitted on 1F1B with the fewest micro-batches and 1F1B-I with the "
        "most, by a factor for what stands outside of the pipeline and by what a message keeps its rank busy with.",
        table(["model", "factor", "us for a message", "worst of the 7 others"], sample_rows),
        f"Pairs of schedules in the wrong order: {len(wrong)} of 36, which were measured at most "
        f"{100 * max(wrong, default=0.0):.1f} % apart.",
        target("bubbles of 1F1B and ZB-H1, worst difference x 10,000", 1e4 * max(differences), 0.5, at_least=False),
        target("samples per second, worst error", 100 * max(map(abs, errors)), 5.0, at_least=False, unit=" %"),
    )
    record.data["zero_bubble"] = {"bubbles": max(differences), "samples": max(map(abs, errors)), "apart": max(wrong)}


def clusters(record: Record) -> None:
    """Steps on growing numbers of GPUs."""
    rows, errors = [], []

    def judge(source: str, gpus: int, published: float, simulated: float) -> None:
        errors.append(simulated / published - 1)
        rows.append([source, gpus, published, f"{simulated:.2f}", f"{100 * errors[-1]:+.1f} %"])

    for source, (schedule, ranks, chunks, replica), batch, steps in CLUSTERS:
        microbatches = {gpus: batch // (gpus // replica) for gpus in steps}
        terms = {gpus: [simulate(actions(schedule, ranks, chunks, n)).seconds, 1.0] for gpus, n in microbatches.items()}
        first, *between, last = steps
        a, b = fitted([terms[first], terms[last]], [steps[first], steps[last]])
        for gpus in between:
            judge(source, gpus, steps[gpus], a * terms[gpus][0] + b)
    few, many = (simulate(actions("1F1B-I", 16, 8, microbatches)).busy_share for microbatches in LLAMA)
    judge("Llama 3 405B (arXiv:2407.21783), TFLOP/s of a GPU", 16384, LLAMA[16], LLAMA[32] * many / few)
    worst = max(map(abs, errors))
    record.section(
        "Growing clusters",
        "Seconds of a step, fitted on the first and the last number of GPUs. Llama 3 has two rows of one kind, and is "
        "fitted on the first alone, without `b`.",
        table(["source", "GPUs", "published", "simulated", "error"], rows),
        target("worst error", 100 * worst, 5.0, at_least=False, unit=" %"),
    )
    record.data["clusters"] = worst


def main() -> None:
    """Run, print, record."""
    args = parser(__doc__).parse_args()
    record = Record("scale", "Simulated steps and published ones", args, "the tables.", method="Nothing is trained.")
    zero_bubble(record)
    if not args.quick:
        clusters(record)
    large = actions("1F1B", 128, 1, 512)
    begin = time.perf_counter()
    simulate(large)
    seconds = time.perf_counter() - begin
    record.section("Speed", target("128 ranks, 512 micro-batches", seconds, 2.0, at_least=False, unit=" s"))
    record.finish()


if __name__ == "__main__":
    main()
