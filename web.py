"""Requests over HTTP, to rewards in other processes and to SGLang's servers."""

import http.client
import ipaddress
import queue
import threading
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from guard import UserError


class ServerError(UserError):
    """A request that may succeed with another server, or again; `gone`: this server's process isn't there any more."""

    def __init__(self, reason, gone=False):
        super().__init__(reason)
        self.gone = gone


def is_loopback(host):
    """Whether a name or address is this machine's own."""
    host = host.rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


class Proxies(urllib.request.ProxyHandler):
    """Those of the environment (http_proxy, no_proxy, ...), which have no business with this machine's addresses."""

    def proxy_open(self, request, proxy, type):
        return None if is_loopback(urlsplit(request.full_url).hostname) else super().proxy_open(request, proxy, type)


def request(url, body=None, headers=None, timeout=30):
    """GET, or POST of bytes -> (code, headers, bytes) of the answer, whatever its code.

    ServerError where none came whole within timeout seconds: from the name's look-up to the last byte.
    """
    outcome, until = queue.SimpleQueue(), time.monotonic() + timeout

    def ask():
        try:
            asked = urllib.request.Request(url, body, headers or {})
            try:
                answer = urllib.request.build_opener(Proxies()).open(asked, timeout=timeout)
            except urllib.error.HTTPError as error:
                answer = error  # is one too
            with answer:
                chunks = []
                while time.monotonic() < until and (chunk := answer.read1(1 << 20)):  # each waits for some bytes only
                    chunks.append(chunk)
                if answer.length:
                    raise http.client.IncompleteRead(b"", answer.length)
            outcome.put((answer.status, answer.headers, b"".join(chunks)))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        found = outcome.get(timeout=timeout)
    except queue.Empty:
        raise ServerError(f"{url}: timed out") from None
    if isinstance(found, Exception):
        cause = getattr(found, "reason", found)
        reason = str(cause) or type(cause).__name__
        raise ServerError(f"{url}: {reason}", gone=not isinstance(cause, TimeoutError)) from None
    return found


def retry_after(headers):
    """Seconds that an answer asks to wait for, given as such or as a date; None where it doesn't say."""
    asked = headers.get("Retry-After", "").strip()
    try:
        return float(asked) if asked.isdecimal() else max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
