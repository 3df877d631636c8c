"""The certificate: what was verified, with which versions, and what came out; as JSON and as text."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from colonnade.cluster.device import device_type
from colonnade.errors import UsageError
from colonnade.testing.parity import Tolerance
from colonnade.tools.verify.job import RESULT, Job

SAME, DIFFERENT = "same", "different"
FORMAT = 1


def make_certificate(job: Job) -> dict[str, Any]:
    """The certificate for a job whose workers have ended well."""
    result = json.loads((job.folder / RESULT).read_text(encoding="utf-8"))
    config = job.config()
    return {
        "format": FORMAT,
        "verdict": SAME if result["ok"] else DIFFERENT,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": device_type(),
        "model": {"class": job.model, "type": config.model_type, "source": job.source, "parameters": job.parameters},
        "twin": {"parameters": result["weights"], "config": config.to_diff_dict()},
        "layout": {**asdict(job.layout), "text": str(job.layout), "mesh": result["layout"]},
        "steps": job.steps,
        "differences": result["differences"],
        "rounding_of_one_process": result["rounding"],
        "differences_in_fp64": result["exact"],
        "fp32_is_unsure": result["unsure"],
        "weights_compared": result["weights_compared"],
        "saving": result["saving"],
        "traffic_per_step": result["traffic"],
        "parameters_of_rank_0": result["held"],
        "expected_all_reduces": job.expected_all_reduces,
        "uneven": job.uneven,
        "places": result["places"],
        "report": result["text"],
    }


def versions() -> dict[str, str]:
    """Versions of what took part."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("colonnade", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def write_certificate(certificate: dict[str, Any], path: Path) -> None:
    """Write it as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(certificate, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the certificate cannot be written to {path}: {error}") from error


def certificate_text(certificate: dict[str, Any]) -> str:
    """The report for the person at the terminal."""
    model, twin = certificate["model"], certificate["twin"]
    same = certificate["verdict"] == SAME
    lines = [
        f"{model['class']}: {model['source']}, {model['parameters']:,} parameters",
        f"verified on a twin of the same structure with {twin['parameters']:,} parameters: "
        f"{certificate['layout']['text']} beside one process, {certificate['steps']} steps",
        "",
        *map(_difference, certificate["differences"]),
        f"  {certificate['saving']['text']}",
        f"  {'traffic':<14} {_traffic(certificate)} in a step",
        *_over_dp(certificate),
        "  one process in fp32 is itself off from fp64 by "
        + ", ".join(f"{_number(value)} ({kind})" for kind, value in certificate["rounding_of_one_process"].items()),
        *_exact(certificate),
        *_places(certificate["places"], certificate["layout"]["pp"]),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(certificate["versions"].items()))
    verdict = "the same numbers as one process" if same else "NOT the numbers of one process"
    uneven = ["", *certificate["uneven"].splitlines()] if certificate["uneven"] else []
    return "\n".join([*lines, *uneven, "", f"{verdict}  ({versions})"])


def _difference(difference: dict[str, Any]) -> str:
    """One kind of difference: the worst, and two more places."""
    kind = f"  {difference['kind']:<14}"
    if difference["note"]:
        return f"{kind} {difference['note']}"
    sign = "≤" if difference["ok"] else ">"
    text = f"{kind} {_number(difference['worst']):>8} {sign} {_number(difference['tolerance'])}   {difference['where']}"
    more = [where for _, where in difference["failures"] if where != difference["where"]]
    text += "".join(f"; {where}" for where in more[:2]) + (f"; and {len(more) - 2} more" if len(more) > 2 else "")
    return text.rstrip()


def _exact(certificate: dict[str, Any]) -> list[str]:
    """What fp64 says where fp32 cannot."""
    found = certificate["differences_in_fp64"]
    if found is None:
        return []
    sign = "≤" if certificate["verdict"] == SAME else "against"
    values = ", ".join(f"{_number(value)} ({kind})" for kind, value in found.items())
    return [f"  compared in fp64, as {certificate['fp32_is_unsure']}: {values} {sign} {_number(Tolerance().gradient)}"]


def _traffic(certificate: dict[str, Any]) -> str:
    counts = [
        f"{t['calls']} {t['operation'].replace('_', '-')} over {t['axis']}" for t in certificate["traffic_per_step"]
    ]
    reduced = sum(
        t["calls"] for t in certificate["traffic_per_step"] if (t["operation"], t["axis"]) == ("all_reduce", "tp")
    )
    expected = certificate["expected_all_reduces"]
    note = "" if expected is None or reduced == expected else f" (explain counts {expected} all-reduces over tp)"
    return (", ".join(counts) or "nothing") + note


def _over_dp(certificate: dict[str, Any]) -> list[str]:
    """What travels over the data-parallel ranks; 2 elements a parameter is what any of these layouts needs."""
    if certificate["layout"]["dp"] == 1:
        return []
    # an all-reduce is a reduce-scatter and an all-gather
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    moved = sum(
        passes.get(t["operation"], 1) * t["elements"] for t in certificate["traffic_per_step"] if t["axis"] == "dp"
    )
    held = certificate["parameters_of_rank_0"]
    return [f"  {'':<14} over dp {moved / held:.2f} elements for each of the {held:,} parameters of rank 0"]


def _places(places: dict[str, Any] | None, pp: int) -> list[str]:
    if places is None:
        return []
    lines = ["", "  where the runs part:" if pp == 1 else "  where the runs part, in one micro-batch:"]
    lines.append(f"    first output that differs, in forward order:            {_place(places['forward'])}")
    follows = "" if places["forward"] is None or places["backward"] is None else "  (may follow from the output)"
    lines.append(f"    first output gradient that differs, in backward order:  {_place(places['backward'])}{follows}")
    lines += [f"    suspect: {suspect}" for suspect in places["suspects"]]
    if places["forward"] is None and places["backward"] is None and not places["suspects"]:
        lines.append(
            "    all module outputs and their gradients agree: look at how the gradients of the parameters above are"
        )
        lines.append("    completed (a norm inside a region needs head_norm), or at their update")
    return lines


def _place(place: dict[str, Any] | None) -> str:
    if place is None:
        return "none"
    return f"{place['module']} ({place['kind']}), off by {_number(place['difference'])} on rank {place['rank']}"


def _number(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value)
