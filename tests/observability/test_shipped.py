"""`headrace dashboards`: what it writes, and what it says to a Grafana and to a person when that goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest
from ruamel.yaml import YAML

from gateway.cli import main
from gateway.observe import shipped

ROOT = Path(__file__).parents[2]


@dataclass
class Grafana:
    """The two routes of Grafana that a push needs, as its HTTP API describes them."""

    token: str = ""
    folder_there: bool = False
    url: str = ""
    folders: list[dict[str, Any]] = field(default_factory=list)
    dashboards: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, path: str, authorization: str, body: Any) -> tuple[int, dict[str, Any]]:
        if self.token and authorization != f"Bearer {self.token}":
            return 401, {"message": "Invalid API key"}
        if path == "/api/folders":
            self.folders.append(body)
            return (409, {"message": "exists"}) if self.folder_there else (200, {"uid": body["uid"]})
        assert path == "/api/dashboards/db"
        self.dashboards.append(body)
        uid = body["dashboard"]["uid"]
        return 200, {"status": "success", "uid": uid, "url": f"/d/{uid}/name"}


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    played = Grafana()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
            status, told = played.answer(self.path, self.headers.get("authorization", ""), body)
            data = orjson.dumps(told)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        played.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield played
        finally:
            server.shutdown()
            thread.join()


def test_export_writes_everything_that_a_grafana_and_a_prometheus_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "export", str(tmp_path / "new" / "folder")]) == 0

    written = {
        str(path.relative_to(tmp_path / "new" / "folder")) for path in map(Path, capsys.readouterr().out.split())
    }
    assert written >= {
        "grafana/dashboards/headrace-overview.json",
        "grafana/provisioning/dashboards/headrace.yaml",
        "grafana/provisioning/datasources/prometheus.yaml",
        "prometheus/prometheus.yml",
        "prometheus/headrace-rules.yml",
        "prometheus/headrace-alerts.yml",
    }


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    assert main(["dashboards", "export", str(tmp_path / "file")]) == 2

    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("folder_there", [False, True])
def test_push_puts_every_dashboard_into_one_folder(
    grafana: Grafana, folder_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", "secret-token")
    grafana.token, grafana.folder_there = "secret-token", folder_there

    assert main(["dashboards", "push", "--grafana", grafana.url + "/"]) == 0

    assert [one["dashboard"] for one in grafana.dashboards] == list(shipped.dashboards().values())
    assert {(one["folderUid"], one["overwrite"]) for one in grafana.dashboards} == {(grafana.folders[0]["uid"], True)}
    told = capsys.readouterr()
    assert f"{grafana.url}/d/headrace-overview/name" in told.out.split()
    assert "secret-token" not in told.out + told.err


def test_a_grafana_that_refuses_us_says_how_to_give_a_token(
    grafana: Grafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    grafana.token = "other"

    assert main(["dashboards", "push", "--grafana", grafana.url]) == 2

    assert "GRAFANA_TOKEN" in capsys.readouterr().err


def test_nothing_at_the_address_is_told_with_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "push", "--grafana", "http://127.0.0.1:9"]) == 2

    assert "http://127.0.0.1:9/api/folders" in capsys.readouterr().err


@pytest.mark.parametrize("link", ["grafana", "deploy/prometheus"])
def test_the_repository_shows_the_files_where_operators_look(link: str) -> None:
    assert (ROOT / link).resolve() == (ROOT / "gateway" / "observe" / Path(link).name).resolve()


def test_the_provisioned_data_source_has_no_uid_that_a_dashboard_could_depend_on() -> None:
    folder = ROOT / "grafana" / "provisioning"
    (source,) = YAML(typ="safe").load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = YAML(typ="safe").load((folder / "dashboards" / "headrace.yaml").read_text())["providers"]

    assert source["isDefault"]
    assert "uid" not in source
    assert provider["type"] == "file"
