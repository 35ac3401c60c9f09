"""HTTPS by the server itself, and behind a real nginx that is configured as docs/operations.md says."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.server.serving import HI, KEY, TOKENMILL, WAIT_S, Running, child, running
from tests.server.wire import LONG, chat_body, stream_text, until
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel, FaultKind
from tokenmill.cli.main import main
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.server.app import check_certificate
from tokenmill.server.config import ServerConfig, hash_key, read_server_table, settings_of

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
CLIENT = "127.0.0.2"
"""An address of this machine that is not the proxy's."""
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Certificate:
    """Self-signed, for 127.0.0.1: its own authority."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, password: str | None = None) -> Certificate:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        made = cls(folder / "certificate.pem", folder / "key.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
        command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
        subprocess.run([*command, "-keyout", made.key, "-out", made.certificate], check=True, capture_output=True)
        return made

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate.make(tmp_path_factory.mktemp("certificate"))


def fake_server(**settings: Any) -> Any:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=8192, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4), kv_cache_tokens=32_768)
    return running(llm, ServerConfig(key_hashes=(hash_key(KEY),), keep_alive_s=20.0, **settings))


# -- HTTPS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(certificate: Certificate) -> Iterator[Running]:
    with fake_server(ssl_certfile=certificate.certificate, ssl_keyfile=certificate.key) as one:
        yield one


def test_an_openai_client_streams_over_https(secure: Running, certificate: Certificate) -> None:
    with openai.OpenAI(
        base_url=f"https://127.0.0.1:{secure.port}/v1",
        api_key=KEY,
        http_client=httpx2.Client(verify=certificate.context()),
    ) as client:
        more = {"ignore_eos": True}
        chunks = client.chat.completions.create(model="fake", messages=HI, max_tokens=8, stream=True, extra_body=more)
        assert list(chunks)[-1].choices[0].finish_reason == "length"


def test_plain_http_gets_nothing_from_https(secure: Running) -> None:
    with secure.connect() as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1.1 200" not in plain.recv(4096)


def test_a_client_that_does_not_know_the_authority_refuses(secure: Running) -> None:
    with secure.connect() as raw, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(raw, server_hostname="127.0.0.1")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close_notify", "FIN"])
def test_a_client_that_leaves_over_https_cancels_its_request(
    secure: Running, certificate: Certificate, stream: bool, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = http.client.HTTPSConnection("127.0.0.1", secure.port, timeout=WAIT_S, context=certificate.context())
    body = json.dumps(chat_body(stream=stream, max_tokens=LONG))
    connection.request("POST", CHAT, body, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
    sock, answer = connection.sock, connection.getresponse() if stream else None
    assert answer is None or answer.read1(64)
    until(lambda: secure.core.call(lambda core: core.stats().num_running).result(WAIT_S) == 1)
    if how == "close_notify":
        sock.setblocking(False)
        with contextlib.suppress(ssl.SSLError):  # the server's own may not be there yet
            sock.unwrap()
    leave(connection, answer)
    secure.wait_until_idle()
    assert [record.message for record in caplog.records if "eof_received" in record.message] == []


def leave(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse | None) -> None:
    if answer is not None:
        answer.close()
    connection.close()


def run_top(url: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [TOKENMILL, "top", "--once", "--url", url, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def test_top_over_https(secure: Running, certificate: Certificate) -> None:
    url = f"https://127.0.0.1:{secure.port}"
    shown = run_top(url, "--api-key", KEY, SSL_CERT_FILE=str(certificate.certificate))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "fake" in shown.stdout
    refused = run_top(url, "--api-key", KEY)
    assert refused.returncode == 2
    assert "self-signed certificate; set SSL_CERT_FILE" in refused.stderr.replace("self signed", "self-signed")


@pytest.mark.parametrize(
    ("case", "saying"),
    [
        ("no certificate", "--ssl-certfile .* cannot be read: No such file or directory"),
        ("no key", "--ssl-keyfile .* cannot be read: No such file or directory"),
        ("key of another", "the private key in .* is not that of .*"),
        ("no PEM", "cannot use the certificate in .*: "),
        ("key alone", "a private key requires its certificate: --ssl-certfile"),
        ("no password", "the private key in .* is encrypted: use --ssl-keyfile-password"),
        ("wrong password", "cannot use the certificate in .* with the private key in .*: "),
    ],
)
def test_a_certificate_that_cannot_be_used_is_one_line(
    case: str,
    saying: str,
    certificate: Certificate,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [certificate.certificate, certificate.key]
    if case.startswith("no ") and case.endswith(("certificate", "key")):
        files[case == "no key"] = tmp_path / "none.pem"
    if case == "no PEM":
        files[0] = tmp_path / "text.pem"
        files[0].write_text("no certificate")
    if case == "key of another":
        files[1] = Certificate.make(tmp_path).key
    if case.endswith("password"):
        other = Certificate.make(tmp_path, password="right")
        files = [other.certificate, other.key]
    arguments = ["--ssl-certfile", str(files[0])] if case != "key alone" else []
    arguments += ["--ssl-keyfile", str(files[1])]
    arguments += ["--ssl-keyfile-password", "wrong"] if case == "wrong password" else []
    monkeypatch.setattr("tokenmill.server.middleware.configure_logs", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["tokenmill", "serve", "fake", "--port", "0", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"tokenmill: {saying}", line), line


def test_https_is_asked_for_in_a_toml_file(tmp_path: Path) -> None:
    """With other settings of the server; what the command line says comes first."""
    made = Certificate.make(tmp_path, password="right")
    toml = tmp_path / "models.toml"
    files = f'ssl_certfile = "{made.certificate}"\nssl_keyfile = "nowhere.pem"\n'
    more = 'ssl_keyfile_password = "right"\nmax_body_bytes = 100\n'
    toml.write_text(f'[[model]]\npath = "fake"\n\n[server]\n{files}{more}')
    with child(tmp_path / "log", "--config", str(toml), "--ssl-keyfile", str(made.key)) as server:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=WAIT_S, context=made.context())
        connection.request("POST", CHAT, json.dumps(chat_body("x" * 100)), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, "100 bytes" in answer.read().decode()) == (413, True)
        connection.close()


def test_settings_of_a_table_have_the_types_of_their_fields() -> None:
    table: dict[str, Any] = {"session_ttl_s": None, "drain_s": 0, "insecure": True, "cors_origins": ["a"], "idle_s": 3}
    assert settings_of(table, table.keys(), "here") == {**table, "cors_origins": ("a",)}


@pytest.mark.parametrize(
    ("table", "saying"),
    [
        ("server = 5", r"\[server\] must be a table"),
        ("[server]\nport = 1", r"\[server\]: unknown setting port; supported: body_timeout_s, "),
        ("[server]\nssl_certfile = 5", "ssl_certfile must be a string, not 5"),
        ("[server]\nmax_n = true", "max_n must be a positive integer, not True"),
        ("[server]\nmax_n = 1.5", "max_n must be a positive integer, not 1.5"),
        ("[server]\nidle_s = 0", "idle_s must be a positive number of seconds, not 0"),
        ('[server]\nforwarded_allow_ips = "127.0.0.1"', "forwarded_allow_ips must be a list of strings"),
    ],
)
def test_a_server_table_that_is_wrong_is_named(table: str, saying: str, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(table)
    with pytest.raises(ConfigError, match=saying):
        read_server_table(file)


def test_an_encrypted_key_and_its_password(tmp_path: Path) -> None:
    made = Certificate.make(tmp_path, password="right")
    settings = ServerConfig(ssl_certfile=made.certificate, ssl_keyfile=made.key, ssl_keyfile_password="right")
    check_certificate(settings)
    assert "right" not in repr(settings)


# -- nginx ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proxy:
    """nginx in front of a server."""

    port: int
    server: Running
    context: ssl.SSLContext

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=WAIT_S, context=self.context, source_address=(CLIENT, 0)
        )

    def begin(self, **changes: Any) -> http.client.HTTPSConnection:
        """Send a chat."""
        connection = self.connect()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "X-Forwarded-For": "192.0.2.9"}
        connection.request("POST", CHAT, json.dumps(chat_body(**changes)), headers)
        return connection


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def proxy(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The docs' configuration, with this test's ports and files."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
    nginx = os.environ.get("TOKENMILL_NGINX") or shutil.which("nginx", path=search)
    if nginx is None:
        pytest.skip("nginx is not installed: install it, or name it with TOKENMILL_NGINX")
    (printed,) = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    with fake_server(forwarded_allow_ips=("127.0.0.1",)) as server:
        for old, new in (
            ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
            ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
            ("/etc/ssl/llm.example.com.pem", str(certificate.certificate)),
            ("/etc/ssl/llm.example.com.key", str(certificate.key)),
        ):
            assert old in printed
            printed = printed.replace(old, new)
        paths = "".join(
            f"{kind}_temp_path {folder / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"daemon off;\nmaster_process off;\npid {folder / 'pid'};\nerror_log {folder / 'error.log'};\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{paths}{printed}}}\n"
        )
        process = subprocess.Popen([nginx, "-p", folder, "-e", folder / "error.log", "-c", folder / "nginx.conf"])
        try:
            deadline = time.monotonic() + WAIT_S
            while not is_open(port):
                assert process.poll() is None, (folder / "error.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield Proxy(port, server, certificate.context())
        finally:
            process.terminate()
            process.wait(WAIT_S)


def clients_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.request["client"] for record in caplog.records if hasattr(record, "request")]


def test_a_stream_passes_nginx_token_by_token(proxy: Proxy) -> None:
    """The engine stops in the middle: what it has said until then is there, with nothing behind it."""
    hold = proxy.server.inject(FaultKind.STALL, after=6)
    connection = proxy.begin(stream=True, max_tokens=16)
    answer, read = connection.getresponse(), b""
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    while len(stream_text(read)) < 3:
        read += answer.read1(4096)
    assert b"[DONE]" not in read
    assert not hold.release.is_set()
    hold.release.set()
    assert len(stream_text(read + answer.read())) == 16
    connection.close()


def test_the_log_has_the_address_of_the_client_not_of_nginx(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenmill.access"):
        connection = proxy.begin(max_tokens=2)
        with connection.getresponse() as answer:
            assert answer.status == 200
        connection.close()
        until(lambda: clients_in(caplog))
    assert set(clients_in(caplog)) == {CLIENT}  # the line of a request before may come late


def test_nobody_but_the_proxy_is_believed_about_addresses(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenmill.access"):
        direct = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=WAIT_S, source_address=(CLIENT, 0))
        direct.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}", "X-Forwarded-For": "192.0.2.9"})
        with direct.getresponse() as answer:
            assert answer.status == 200
        direct.close()
        until(lambda: clients_in(caplog))
    assert set(clients_in(caplog)) == {CLIENT}  # the line of a request before may come late


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_nginx_cancels_its_request(proxy: Proxy, stream: bool) -> None:
    core = proxy.server.core
    connection = proxy.begin(stream=stream, max_tokens=LONG)
    answer = connection.getresponse() if stream else None
    assert answer is None or answer.read1(64)
    until(lambda: core.call(lambda one: one.stats().num_running).result(WAIT_S) == 1)
    before = proxy.server.tick()
    leave(connection, answer)
    proxy.server.wait_until_idle()
    assert proxy.server.tick() - before < LONG


@pytest.mark.parametrize("proxies", ["proxy.example.com", "10.0.0.1/8", "300.1.1.1"])
def test_proxies_are_named_by_address(proxies: str) -> None:
    with pytest.raises(ConfigError, match="forwarded_allow_ips"):
        ServerConfig(forwarded_allow_ips=(proxies,))
