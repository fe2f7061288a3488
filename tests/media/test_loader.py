"""Where images may come from: which addresses, hosts, paths and URIs, and how much of each."""

import asyncio
import base64
import gzip
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image

from winnow.config import MediaConfig
from winnow.errors import ConfigError, MediaError
from winnow.media import Fetcher, MediaLoader, fetch as fetching, is_public, loader as loading


def png(color: str = "red", size: tuple[int, int] = (5, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


PNG = png()
BASE64 = base64.b64encode(PNG).decode()
RED = (255, 0, 0)


def load(*sources: Any, fetcher: Fetcher | None = None, **options: Any) -> list[Any]:
    return MediaLoader(MediaConfig(**options), fetcher).load(sources)


# -- addresses ------------------------------------------------------------------------------------------------------

PUBLIC = [
    "93.184.215.14",
    "8.8.8.8",
    "2606:2800:21f:cb07:6820:80da:af6b:8b2c",
    "64:ff9b::5db8:d70e",
    "::ffff:8.8.8.8",
]
PRIVATE = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1",  # noqa: S104
    "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.0.8", "192.0.2.1", "198.18.0.1", "203.0.113.9", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:a00:1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1", "2001:0:7f00:1::1", "100::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC + PRIVATE)
def test_addresses(address: str) -> None:
    assert is_public(ip_address(address)) is (address in PUBLIC)


# However a host spells loopback, the address that it stands for is looked at.
SPELLED = [
    "127.0.0.1",
    "localhost",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "127.1",
    "0",
    "[::1]",
    "[::ffff:7f00:1]",
]


@pytest.mark.parametrize("host", SPELLED)
def test_hosts_of_this_network_are_refused_even_where_they_are_allowed(host: str) -> None:
    class Anything(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            return True

    fetcher = Fetcher([])
    fetcher._domains = Anything()
    with pytest.raises(MediaError, match=r"public internet, got|cannot be fetched|must be a URL"):
        load(f"http://{host}:9/a.png", fetcher=fetcher)


@pytest.mark.parametrize(
    "url",
    ["http://other.test/a.png", "https://allowed.test.other.test/", "http://allowed.test@other.test/", "http:///a.png",
     "http://user:word@allowed.test/", "http://[::1/", "https://127.0.0.1/", "http://allowed.test\\@other.test/",
     "http:a"],
)  # fmt: skip
def test_only_hosts_that_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)  # nothing is looked up
    with pytest.raises(MediaError, match=r"^images\[1\]"):
        load(PNG, url, allowed_media_domains=["Allowed.test"])
    with pytest.raises(MediaError, match=r"allowed_media_domains alone \(none\), got 'allowed.test'"):
        load("https://allowed.test/")


# -- a server -------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    seen: list[str]

    def do_GET(self) -> None:
        self.server.seen.append(self.headers["Host"])  # type: ignore[attr-defined]
        path, _, target = self.path[1:].partition("?")
        body, status = PNG, 200
        if path == "redirect":
            self.send_response(302)
            self.send_header("Location", target)
            self.end_headers()
            return
        if path == "missing":
            status = 404
        elif path == "long":
            body = bytes(3 * 2**20)
        elif path == "packed":
            body = gzip.compress(PNG)
        self.send_response(status)
        if path == "packed":
            self.send_header("Content-Encoding", "gzip")
        if path not in ("long", "slow"):
            self.send_header("Content-Length", str(len(body) + (9 if path == "cut" else 0)))
        self.end_headers()
        try:
            if path == "slow":
                while self.wfile.write(b"x"):
                    time.sleep(0.02)
            self.wfile.write(body)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def local(*domains: str, seconds: float = 5) -> Fetcher:
    """A fetcher for which one address of this machine is public, and no other."""
    return Fetcher(["localhost", *domains], lambda each: str(each) == "127.0.0.1", seconds)


def get(site: Any, path: str, fetcher: Fetcher | None = None, host: str = "localhost") -> Any:
    url = f"http://{host}:{site.server_port}/{path}"
    return load(url, fetcher=fetcher or local())[0].getpixel((0, 0))


class TestServer:
    def test_images_come_also_through_redirects(self, site: Any) -> None:
        port = site.server_port
        assert get(site, "a.png") == RED
        assert get(site, "redirect?/a.png") == RED
        assert get(site, f"redirect?http://localhost:{port}/redirect?/a.png") == RED
        assert set(site.seen) == {f"localhost:{port}"}

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("http://127.0.0.2:{port}/a.png", "public internet, got 127.0.0.2"),
            ("http://169.254.169.254/latest/meta-data", "allowed_media_domains alone"),
            ("http://other.test/", "allowed_media_domains alone"),
            ("file:///etc/passwd", r"http\(s\) URL"),
            ("ftp://localhost/", r"http\(s\) URL"),
            ("/redirect?/redirect?/redirect?/a.png", "redirected more than 3 times"),
            ("", "redirected more than 3 times"),
        ],
    )
    def test_redirects_are_checked(self, site: Any, target: str, message: str) -> None:
        with pytest.raises(MediaError, match=message):
            get(site, f"redirect?{target.format(port=site.server_port)}", local("127.0.0.2"))

    def test_a_name_is_resolved_once_and_connected_where_it_was_checked(
        self, site: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A name server that answers otherwise the second time gains nothing."""
        answers, original = ["127.0.0.1", "127.0.0.9"], socket.getaddrinfo

        def resolve(host: Any, *rest: Any, **options: Any) -> Any:
            return original(answers.pop(0) if host == "rebind.test" else host, *rest, **options)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        assert get(site, "a.png", local("rebind.test"), "rebind.test") == RED
        assert answers == ["127.0.0.9"]
        assert site.seen[-1] == f"rebind.test:{site.server_port}"
        with pytest.raises(MediaError, match=r"got 127\.0\.0\.9"):
            get(site, "a.png", local("rebind.test"), "rebind.test")

    def test_one_private_address_of_several_is_enough(
        self, site: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = [(2, 1, 6, "", (each, 80)) for each in ("127.0.0.1", "10.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with pytest.raises(MediaError, match=r"got 10\.0\.0\.1"):
            get(site, "a.png")

    def test_proxies_of_the_environment_are_not_used(
        self, site: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        assert get(site, "a.png") == RED

    @pytest.mark.parametrize(
        ("path", "message"),
        [("missing", "status 404"), ("cut", "cannot be fetched"), ("packed", "no image file"),
         ("long", "more than 1.0 MiB")],
    )  # fmt: skip
    def test_answers_that_are_no_image(
        self, site: Any, path: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetching, "MAX_BYTES", 2**20)
        with pytest.raises(MediaError, match=rf"^images\[0\].*{message}"):
            get(site, path)

    def test_a_server_that_drips(self, site: Any) -> None:
        began = time.monotonic()
        with pytest.raises(MediaError, match=r"not come within 0\.2 seconds"):
            get(site, "slow", local(seconds=0.2))
        assert time.monotonic() - began < 2

    def test_nobody_answers(self) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://localhost:{closed.getsockname()[1]}/"
            with pytest.raises(MediaError, match="cannot be fetched"):
                load(url, fetcher=local())

    def test_within_an_event_loop(self, site: Any) -> None:
        url = f"http://localhost:{site.server_port}/a.png"
        loader = MediaLoader(MediaConfig(), local())

        async def both() -> None:
            assert await loader.fetch([url, "data:x", url]) == [PNG, "data:x", PNG]
            assert loader.load([url])[0].size == (5, 4)

        asyncio.run(both())


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that may be read, beside one that may not, with links between them."""
    inside, outside = tmp_path / "in", tmp_path / "inn"  # a name that begins alike
    for each in (inside / "sub", outside):
        each.mkdir(parents=True)
        (each / "a b.png").write_bytes(PNG)
    (inside / "wrong.txt").write_bytes(PNG)
    (inside / "loop").symlink_to("loop")
    (inside / "out").symlink_to(outside)
    (inside / "file-out.png").symlink_to(outside / "a b.png")
    (inside / "within.png").symlink_to(inside / "sub" / "a b.png")
    os.mkfifo(inside / "pipe")
    return inside


@pytest.mark.parametrize(
    "source",
    ["sub/a b.png", "{}/sub/a b.png", "file://{}/sub/a%20b.png", "file://localhost{}/sub/a%20b.png", "within.png",
     "out/../sub/a b.png", "wrong.txt", "FILE://{}/within.png"],
)  # fmt: skip
def test_files_below_the_directory(folder: Path, source: str) -> None:
    if source.startswith("out"):  # what comes behind a link is looked for where the link leads
        with pytest.raises(MediaError, match="must lie below"):
            load(source, allowed_local_media_path=folder)
        return
    for each in (
        (source.format(folder), Path(source.format(folder)))
        if "://" not in source
        else (source.format(folder),)
    ):
        assert load(each, allowed_local_media_path=folder)[0].getpixel((0, 0)) == RED


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("../inn/a b.png", "must lie below allowed_local_media_path"),
        ("{}/../inn/a b.png", "must lie below"),
        ("/etc/passwd", "must lie below"),
        ("/nowhere/at/all", "must lie below"),
        ("file:///etc/passwd", "must lie below"),
        ("file://{}/%2e%2e/inn/a%20b.png", "must lie below"),
        ("file://other.test/a.png", "this machine, got host 'other.test'"),
        ("out/a b.png", "must lie below"),
        ("file-out.png", "must lie below"),
        ("loop", "cannot be read"),
        ("missing.png", "cannot be read: No such file"),
        ("sub", "must be a file|cannot be read"),
        ("pipe", "must be a file"),
        ("a\0b.png", "cannot be read"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("ftp://host/a.png", "scheme data, http, https or file"),
        ("", "must be a file|cannot be read"),
    ],
)
def test_files_elsewhere(folder: Path, source: str, message: str) -> None:
    with pytest.raises(MediaError, match=rf"^images\[0\].*(?:{message})") as caught:
        load(source.format(folder), allowed_local_media_path=folder)
    assert len(str(caught.value)) < 500
    with pytest.raises(MediaError, match=r"not set|this machine|scheme"):
        load(source.format(folder))


def test_a_file_that_is_too_long_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_BYTES", 2**20)
    with open(folder / "long.png", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(MediaError, match="no image file"):
        load("long.png", allowed_local_media_path=folder)


# -- URIs and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        f"data:image/png;base64,{BASE64}", f"data:;base64,{BASE64}", f"data:image/jpeg;base64,{BASE64}", PNG,
        f"DATA:IMAGE/PNG;BASE64,{BASE64}", f"data:image/png;charset=utf-8;base64,{BASE64}",
        f"data:image/png;base64,{BASE64.rstrip('=')}", bytearray(PNG), memoryview(PNG), Image.new("L", (5, 4), 76),
        "data:image/png;base64," + BASE64.replace("+", "%2B").replace("=", "%3D"),
        "data:image/png;base64,\n" + "\r\n".join(BASE64[i : i + 60] for i in range(0, len(BASE64), 60)),
    ],
    ids=range(12),
)  # fmt: skip
def test_sources(source: Any) -> None:
    [image] = load(source)
    assert image.mode == "RGB" and image.size == (5, 4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:", "data: URI in Base64"),
        ("data:image/png", "data: URI in Base64"),
        (f"data:image/png,{BASE64}", "data: URI in Base64"),
        (f"data:image/png;base64;charset=x,{BASE64}", "data: URI in Base64"),
        ("data:image/png;base64,", "no image file"),
        ("data:image/png;base64,!!!!", "must be Base64"),
        ("data:image/png;base64,abc\u00e9", "must be Base64"),
        ("data:image/png;base64,iVBORw0KG", "must be Base64|no image file"),
        (f"data:image/png;base64,{BASE64[:40]}", "is "),
        (f"data:text/html;base64,{BASE64}", "of type 'text/html'"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "no image file"),
        ("data:image/png;base64," + "A" * 50_331_649, "at most 32.0 MiB"),
        (7, "got int"),
        (None, "got NoneType"),
        ({"url": "x"}, "got dict"),
    ],
)
def test_sources_that_are_none(source: Any, message: str) -> None:
    with pytest.raises(MediaError, match=rf"^images\[1\] .*(?:{message})") as caught:
        load(PNG, source)
    assert len(str(caught.value)) < 400


def test_numbers_of_images_and_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load() == []
    assert len(load(PNG, PNG, limit_mm_per_prompt=2)) == 2
    with pytest.raises(MediaError, match=r"at most 2 \(limit_mm_per_prompt\), got 3"):
        load("https://nobody.test", PNG, b"", limit_mm_per_prompt={"image": 2, "video": 0})
    with pytest.raises(MediaError, match="at most 0"):
        load(PNG, limit_mm_per_prompt=0)
    monkeypatch.setattr(loading, "MAX_TOTAL_PIXELS", 50)
    with pytest.raises(MediaError, match="at most 50 pixels, got 60 in 3"):
        load(PNG, PNG, PNG, PNG)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_mm_per_prompt": -1}, {"limit_mm_per_prompt": {"images": 2}}, {"limit_mm_per_prompt": {"image": "2"}},
        {"limit_mm_per_prompt": True}, {"allowed_media_domains": ["http://a.test"]}, {"allowed_media_domains": ["*"]},
        {"allowed_media_domains": [""]}, {"allowed_media_domains": [7]},
        {"allowed_local_media_path": "/nowhere/at/all"},
    ],
)  # fmt: skip
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        MediaConfig(**options)
