"""The files that show the gateway's numbers, as they are shipped: dashboards, provisioning, scrape job, rules, alerts.

They lie beside this module as data, one copy; `grafana/` and `deploy/prometheus/` of the repository point here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson

_HERE = Path(__file__).parent
_FOLDERS = ("grafana", "prometheus")
GRAFANA_FOLDER = "headrace"
"""Uid of the folder of Grafana that the dashboards are put into."""
PUSH_TIMEOUT_S = 20.0


class PushRefused(Exception):
    """Grafana did not take a dashboard."""


def files() -> Iterator[tuple[str, Path]]:
    """(path below the folder that is written, file), in order."""
    for folder in _FOLDERS:
        for path in sorted((_HERE / folder).rglob("*")):
            if path.is_file():
                yield str(path.relative_to(_HERE)), path


def dashboards() -> dict[str, dict[str, Any]]:
    """Name of the file -> the dashboard."""
    return {path.name: orjson.loads(path.read_bytes()) for name, path in files() if path.suffix == ".json"}


def export(folder: Path) -> list[Path]:
    """Write everything below a folder, which is made if need be; files of the same names are replaced.

    Raises OSError.
    """
    written = []
    for name, path in files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        written.append(target)
    return written


def push(grafana_url: str, headers: Mapping[str, str]) -> list[str]:
    """Put every dashboard into a running Grafana, over the ones of the same uid; their pages' URLs.

    Raises PushRefused with the place, what was said, and what to do.
    """
    base = grafana_url.rstrip("/")
    with httpx.Client(headers=dict(headers), timeout=PUSH_TIMEOUT_S) as client:
        _post(client, f"{base}/api/folders", {"uid": GRAFANA_FOLDER, "title": "Headrace"}, taken={409, 412})
        pages = []
        for dashboard in dashboards().values():
            body = {
                "dashboard": dashboard,
                "folderUid": GRAFANA_FOLDER,
                "overwrite": True,
                "message": "headrace dashboards",
            }
            answer = _post(client, f"{base}/api/dashboards/db", body)
            pages.append(base + str(answer.get("url", "")))
        return pages


def _post(
    client: httpx.Client, url: str, body: object, taken: frozenset[int] | set[int] = frozenset()
) -> dict[str, Any]:
    """Grafana's answer; {} for a status in `taken`, which says that what is wanted is there already."""
    try:
        answer = client.post(url, content=orjson.dumps(body), headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        raise PushRefused(f"{url}: {error or type(error).__name__}; is this the address of a Grafana?") from error
    if answer.status_code in taken:
        return {}
    if answer.status_code in {401, 403}:
        raise PushRefused(
            f"{url}: {answer.status_code}; give a service account's token that may edit dashboards in GRAFANA_TOKEN"
        )
    if answer.is_success:
        try:
            told = answer.json()
        except ValueError:
            told = None
        if isinstance(told, dict):
            return told
    raise PushRefused(f"{url}: {answer.status_code} {answer.text[:200]!r}; expected Grafana's answer in JSON")
