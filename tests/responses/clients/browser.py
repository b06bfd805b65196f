"""A page in a real browser (headless Chromium) that tries to read what the proxy says, and to make
the model work."""

import html
import json
import re
import shutil
from typing import Any

from llama_worker import free_port
from tests.responses.clients.coding import said
from tests.responses.clients.stage import Stage
from tests.responses.conftest import HOST, Upstream, answer

EVIL = "evil.example"
REBOUND = f"--host-resolver-rules=MAP {EVIL} {HOST}"
PAGE = """<!doctype html><pre id="out"></pre><form id="form" method="post" target="frame"><input name="input"></form>
<iframe name="frame"></iframe><script>
const url = location.search.slice(1), found = {}, wait = (s) => new Promise((done) => setTimeout(done, s * 1000));
async function attempt(name, act) {
  try { found[name] = await Promise.race([act(), wait(3).then(() => "no answer")]); }
  catch (error) { found[name] = "refused"; }
}
const body = JSON.stringify({model: "m", input: "Hi", stream: true});
const loaded = (tag, path) => new Promise((done, failed) => {
  const element = document.createElement(tag);
  element.onload = () => done("loaded"); element.onerror = failed; element.src = url + path;
  document.body.append(element);
});
(async () => {
  await attempt("read", async () => (await fetch(url + "/v1/models")).text());
  await attempt("create", async () => (await fetch(url + "/v1/responses",
    {method: "POST", body, headers: {"Content-Type": "application/json"}})).text());
  await attempt("create as text", async () => (await fetch(url + "/v1/responses", {method: "POST", body})).text());
  await attempt("chat, not to be read", async () => (await fetch(url + "/v1/chat/completions",
    {method: "POST", body: '{"messages": []}', mode: "no-cors"})).type);
  await attempt("beacon", async () => { navigator.sendBeacon(url + "/v1/responses", body); return "sent"; });
  await attempt("image", () => loaded("img", "/v1/models"));
  await attempt("script", () => loaded("script", "/v1/models"));
  await attempt("events", () => new Promise((done, failed) => {
    const source = new EventSource(url + "/v1/models"); source.onopen = () => done("open");
    source.onerror = () => { source.close(); failed(); };
  }));
  await attempt("socket", () => new Promise((done, failed) => {
    const socket = new WebSocket(url.replace("http", "ws") + "/v1/models");
    socket.onopen = () => done("open"); socket.onerror = failed;
  }));
  const form = document.getElementById("form"); form.action = url + "/v1/responses"; form.submit();
  await wait(1);
  document.getElementById("out").textContent = "FOUND" + JSON.stringify(found) + "END";
})();
</script>"""


def a_foreign_page_gets_nothing_and_moves_nothing(on: Stage) -> None:
    """Of another origin on this machine: what is reached is refused, and nothing reaches the
    server."""
    on.plays(said("secret"), api_key="secret")
    found = _browse(on, HOST)
    assert set(found.values()) <= {"refused", "opaque", "sent", "no answer"}, found
    assert on.bodies == on.journal.facts("request") == []


def a_page_under_a_rebound_name_gets_nothing(on: Stage) -> None:
    """Its own name leads to this machine, so that to the browser the proxy is the page's own
    server."""
    on.plays(said("secret"), api_key="secret")
    assert "secret" not in json.dumps(_browse(on, EVIL, REBOUND))
    assert on.journal.facts("request") == []
    assert "not an address of this machine" in _dump(
        on, f"http://{EVIL}:{on.proxy.port}/v1/models", REBOUND
    )


def an_allowed_page_is_served(on: Stage) -> None:
    """The one that was named reads a stream."""
    port = free_port()
    on.plays(said("Hello, page."), allow_origins=(f"http://{HOST}:{port}",))
    found = _browse(on, HOST, page_port=port)
    assert "Hello, page." in found["create"], found
    assert "Hello, page." in found["create as text"], found


def _browse(on: Stage, proxy_host: str, *options: str, page_port: int = 0) -> dict[str, Any]:
    """What a page found out that tries everything with the proxy under that name."""
    with Upstream(answer(PAGE.encode(), headers=b"Content-Type: text/html\r\n"), page_port) as page:
        shown = _dump(
            on, f"http://{HOST}:{page.port}/?http://{proxy_host}:{on.proxy.port}", *options
        )
    told = re.search(r"<pre id=\"out\">FOUND(.*?)END</pre>", shown, re.DOTALL)
    assert told is not None, shown
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    assert len(found) == 9, found
    return found


def _dump(on: Stage, address: str, *options: str) -> str:
    """The page as it is after its scripts have run."""
    program = shutil.which("chromium") or "chromium"
    fixed = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--timeout=30000",
    ]
    wait = ["--virtual-time-budget=40000", "--dump-dom"]
    return on.run(
        program, *fixed, f"--user-data-dir={on.home}/chromium", *options, *wait, address
    ).stdout
