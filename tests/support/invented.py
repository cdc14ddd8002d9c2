"""Records of jobs that nobody ran: to draw every table and picture without a model."""

from __future__ import annotations

import random

from specache_bench.records import Job, Record

SHARE = {"full": 1.0, "kivi": 0.1, "specache": 0.12, "kcache": 0.55, "quantized": 0.2}


def invented(job: Job) -> Record:
    """A record with plausible numbers, always the same for a job."""
    rng, full_bytes = random.Random(job.key), 2048 * job.workload.length
    widest = 1.0 if job.method.name == "full" else 1.5
    share = SHARE.get(job.method.name.partition(":")[0], 0.13) * rng.uniform(1, widest)
    rates = {"exact_hit_rate": 0.7, "topk_hit_rate": 0.8, "bits_per_value": 1.5}
    return Record(
        {
            "scores": [rng.random() for _ in range(job.workload.number)],
            "predictions": ["v001"] * job.workload.number,
            "device_bytes": int(share * full_bytes),
            "full_bytes": full_bytes,
            "decode_ms": rng.uniform(10, 200),
            "seconds": 1.0,
            "stats": {**rates, "prefetched_bytes": 9e4, "steps": 9.0},
        }
    )
