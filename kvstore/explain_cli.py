"""The command `reprise store explain`: why a request did not reuse more, or what became of a key.

Owns its options, the access logs that it reads, and how an account is put for people. Does not know why anything
happened (``explain`` and ``account`` do), nor how nodes are asked.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvstore import limits
from kvstore.access import read_token
from kvstore.account import Account, Memories, OtherSpace, Removal, Use, account_of
from kvstore.client import StoreClient
from kvstore.errors import StoreError
from kvstore.explain import Access, Explanation, explain, read_access
from kvstore.inquiry import inquire
from kvstore.keys import BlockKey, BlockName, SpaceId
from kvstore.sightings import named_by_key
from kvstore.store import Pin, Policy, Presence, Store
from kvstore.units import format_bytes_short, parse_seconds
from kvstore.wording import moment, printable, span, utc

Reported = Callable[[], AbstractContextManager[None]]

EXIT_FAILED = 1
RECORD_BYTES_MAX = 256 * limits.KIB
RECORDS_PER_REQUEST_MAX = 64
SPACE_DIGITS_SHOWN = 12
PLAIN_WIDTH = 200
"""Columns where the output is no terminal, so that a pipe sees every value whole."""
_KEY = re.compile(r"[0-9a-fA-F]{64}\Z")
_NUMBER = re.compile(r"-[0-9]{1,4}\Z")
"""What engines add to a request's id for each of its prompts."""
EPILOG = (
    "Examples: reprise store explain REQUEST-ID --log data/prefill/access.jsonl --store 127.0.0.1:7071; "
    "reprise store explain KEY --store 127.0.0.1:7071 --store 127.0.0.1:7171"
)


def add_explain(app: typer.Typer, reported: Reported) -> None:
    """Add the command. ``reported``: turns errors into a line and an exit code."""

    @app.command("explain", epilog=EPILOG)
    def explain_(
        what: Annotated[
            str, typer.Argument(metavar="WHAT", help="A request's x-request-id, or a block's key (64 hex digits).")
        ],
        log: Annotated[
            list[Path] | None, typer.Option(help="For a request: access log of a worker; repeat for several.")
        ] = None,
        store: Annotated[
            list[str] | None,
            typer.Option(
                envvar="REPRISE_STORE", help="Store node; repeat for all nodes (in the variable, spaces between)."
            ),
        ] = None,
        token_file: Annotated[
            Path | None,
            typer.Option("--token-file", envvar="REPRISE_TOKEN_FILE", help="File that holds the store's token."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        deadline: Annotated[str, typer.Option(help="How long to wait for the nodes.")] = "30s",
    ) -> None:
        """Why a request missed, or what became of a key.

        Of a request: the first block that it missed, and why. Of that block and the last one reused, or of a key: when
        it was written and touched, by which class, until when it is promised, who holds it; or what removed it, when,
        and under which policy; and in which other spaces the same tokens lie. Exit code 1 if a node did not answer.
        """
        with reported():
            token, deadline_s = read_token(token_file), parse_seconds(deadline)
            records = [read_access(row) for path in log or () for row in records_of(path, what)]
            with Nodes(store or (), token, deadline_s) as nodes:
                if records:
                    _explain_request(nodes, records, as_json=as_json)
                elif _KEY.match(what):
                    _explain_key(nodes, BlockKey(bytes.fromhex(what)), as_json=as_json)
                else:
                    raise typer.Exit(_not_found(what, log or ()))


class Nodes:
    """The nodes of one command: all as one, and each by itself. Closed at the end."""

    def __init__(self, addresses: Sequence[str], token: str | None, deadline_s: float) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self._token = token
        self._deadline_s = deadline_s
        self._opened = ExitStack()
        self._each: dict[str, Store] = {}
        self._all: Store | None = None

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def ask(self, space_id: SpaceId | None, name: BlockName) -> Memories:
        """What they remember of a block. Raises StoreError if none answers, ValueError if none is named."""
        if not self.addresses:
            raise ValueError("name a node: --store ADDRESS, or REPRISE_STORE in the environment")
        if self._all is None:
            self._each = {address: self._open([address]) for address in self.addresses}
            self._all = self._open(self.addresses)
        return inquire(self._all, self._each, space_id, name, deadline_s=self._deadline_s)

    def _open(self, addresses: Sequence[str]) -> Store:
        client = StoreClient.connect(addresses, token=self._token)
        self._opened.callback(client.close)
        return client


def _explain_request(nodes: Nodes, records: Sequence[Access], *, as_json: bool) -> None:
    """The records of a request, each with what is known of its first miss; the records alone must do without nodes."""
    explanations = [_explanation(nodes, access) for access in records]
    if as_json:
        print(json.dumps([item.to_json() for item in explanations], indent=2))
    else:
        for item in explanations:
            print(f"{item.request_id} ({item.role}): {reused_tokens(item)}")
            print(f"  {item.cause}: {item.sentence}")
            for title, account in (("the first block missed", item.account), ("the last block reused", item.reused)):
                if account is not None:
                    print(f"  {title}:")
                    _print_account(account)
    failed: dict[str, str] = {}
    for item in explanations:
        for account in filter(None, (item.account, item.reused)):
            failed |= account.nodes_failed
    _fail_for(failed)


def reused_tokens(item: Explanation) -> str:
    """How many tokens of a prompt were reused; of an engine of others, which cache they came from."""
    told = f"{item.hit_tokens + item.engine_tokens} of {item.prompt_tokens} prompt tokens reused"
    if not item.engine_tokens:
        return told
    return f"{told}: {item.hit_tokens} from the store, {item.engine_tokens} from the engine's own cache"


def _explanation(nodes: Nodes, access: Access) -> Explanation:
    miss, reused = access.first_miss, None
    if not nodes.addresses:
        return explain(access, None, {})
    try:
        if access.last_hit is not None:
            reused = account_of(access.last_hit, access.space_id, nodes.ask(None, named_by_key(access.last_hit)))
        if miss is None:
            return replace(explain(access, None, {}), reused=reused)
        memories = nodes.ask(access.space_id, miss.name)
    except StoreError as error:
        print(f"the store was not asked for more: {error}", file=sys.stderr)
        return explain(access, None, {})
    memories = replace(memories, spaces={**memories.spaces, access.space_id: access.space})
    account = account_of(miss.name.key, access.space_id, memories)
    return replace(explain(access, memories.sighting, memories.spaces), account=account, reused=reused)


def _explain_key(nodes: Nodes, key: BlockKey, *, as_json: bool) -> None:
    account = account_of(key, None, nodes.ask(None, named_by_key(key)))
    if as_json:
        print(json.dumps(account.to_json(), indent=2))
    else:
        _print_account(account)
    _fail_for(account.nodes_failed)


def _not_found(what: str, logs: Sequence[Path]) -> int:
    """Say that there is nothing to explain; returns the exit code."""
    if logs:
        print(f"no record of {what} in {', '.join(map(str, logs))}: forgotten, or another log", file=sys.stderr)
        return EXIT_FAILED
    raise ValueError(f"{what[:80]!r} is no key (64 hex digits): for a request, give --log FILE of the worker too")


def _fail_for(nodes_failed: Mapping[str, str]) -> None:
    """Exit with 1, naming the nodes, when some did not answer."""
    for name, error in sorted(nodes_failed.items()):
        print(f"node {name} did not answer: {error}", file=sys.stderr)
    if nodes_failed:
        raise typer.Exit(EXIT_FAILED)


# --- for people -----------------------------------------------------------------------------------------------------


def _print_account(account: Account) -> None:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in account_rows(account, time.time()):
        table.add_row(name, value)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, markup=False, highlight=False, emoji=False)
    console.print(table)


def account_rows(account: Account, now_s: float) -> Iterator[tuple[str, str]]:
    """One fact a row, in the order in which they came about."""
    block = account.block
    yield "key", account.key.hex()
    if account.space_id is not None:
        yield "space", _space_name(account)
    if block is not None:
        first = block.index * block.tokens
        yield "tokens", f"{first:,} to {first + block.tokens - 1:,} of its prompt (block {block.index:,})"
    yield "now", _presence(account)
    if block is not None:
        yield "written", moment(block.written_s, now_s)
    for use in account.uses:
        yield f"touched by {use.name}", _use(use, now_s)
    if account.uses and account.presence == Presence.PRESENT and account.policy is not None:
        under = f"under policy version {account.policy.version}"
        cut = ", as its class has a maximum age" if account.until_s < max(use.until_s for use in account.uses) else ""
        yield "promised until", f"{moment(account.until_s, now_s)}{cut}, {under}{_since(account.policy)}"
    for pin in account.pins:
        yield "on hold by" if pin.hold else "pinned by", _pin(pin, now_s)
    if account.removal is not None:
        yield from _removal(account.removal, now_s)
    for other in account.other_spaces:
        yield "also in space", _other(other)


def _space_name(account: Account) -> str:
    short = (account.space_id or b"").hex()[:SPACE_DIGITS_SHOWN]
    if account.space is None:
        return f"{short} (not registered here)"
    return f"{short} {printable(account.space.model)}" + (" (tenant)" if account.space.tenant_salt is not None else "")


def _presence(account: Account) -> str:
    if account.presence == Presence.UNREACHABLE:
        return "unknown: a node that may hold it did not answer"
    if account.presence == Presence.NEVER:
        return "not stored: it never was, or so long ago that the store forgot"
    if account.block is None:
        return "stored" if account.presence == Presence.PRESENT else "not stored any more"
    payload, stored = (format_bytes_short(size) for size in (account.block.payload_bytes, account.block.stored_bytes))
    size = f"{payload}, {stored} on disk"
    return f"stored ({size})" if account.presence == Presence.PRESENT else f"not served; to be swept ({size})"


def _use(use: Use, now_s: float) -> str:
    kept = f"for which it is kept {span(use.until_s - use.touched_s)}"
    return f"{moment(use.touched_s, now_s)}, {kept}" + ("" if use.ruled else " (no rule names the class: the longest)")


def _pin(pin: Pin, now_s: float) -> str:
    until = f"until {moment(pin.until_s, now_s)}" if pin.until_s else "without end"
    return f"{printable(pin.owner)}, {until}: {printable(pin.reason)}"


def _removal(removal: Removal, now_s: float) -> Iterator[tuple[str, str]]:
    when = moment(removal.at_s, now_s) if removal.at_s else "at a time that is not remembered"
    yield f"{removal.reason.name.lower()}", when
    if removal.policy is not None:
        yield "under policy", f"version {removal.policy.version}{_since(removal.policy)}"
    elif removal.at_s:
        yield "under policy", "one that is not remembered any more"
    if removal.order is not None:
        order = removal.order
        perhaps = "" if removal.order_certain else " (perhaps: the block went while this was carried out)"
        whose = f" for tenant {printable(order.tenant)}" if order.tenant else ""
        why = f": {printable(order.reason)}" if order.reason else ""
        yield "by purge", f"{order.purge_id}{whose}, ordered by {printable(order.author) or 'somebody'}{why}{perhaps}"
    elif removal.reason == Presence.PURGED:
        yield "by purge", "no order with a receipt that is remembered names it: a purge without --proof, or long ago"


def _since(policy: Policy) -> str:
    """When a policy came into force, and by whom, as far as that is known."""
    if not policy.changed_s:
        return ""
    by = f", by {printable(policy.author)}" if policy.author else ""
    return f" (since {utc(policy.changed_s)}{by})"


def _other(other: OtherSpace) -> str:
    fields = ", ".join(other.fields) or "a field that this store does not know"
    return f"{other.space_id.hex()[:SPACE_DIGITS_SHOWN]}, which differs in {fields}"


# --- access logs ----------------------------------------------------------------------------------------------------


def records_of(path: Path, request_id: str) -> Iterator[dict[str, Any]]:
    """The latest records of a request in an access log and its rotated predecessor; damaged lines are passed over.

    Where none has the very id, those of its prompts (``ID-0``), or of the request of which it numbers a prompt. Raises
    ValueError if neither file can be read.
    """
    wanted = _NUMBER.sub("", request_id)
    marks = tuple(json.dumps(name)[:-1].encode() for name in {request_id, wanted})
    found: deque[dict[str, Any]] = deque(maxlen=RECORDS_PER_REQUEST_MAX)
    alike: deque[dict[str, Any]] = deque(maxlen=RECORDS_PER_REQUEST_MAX)
    readable = False
    for part in (path.with_name(path.name + ".1"), path):
        try:
            with part.open("rb") as file:
                readable = True
                while line := file.readline(RECORD_BYTES_MAX):
                    if not any(mark in line for mark in marks) or (row := _record(line)) is None:
                        continue
                    name = str(row.get("request_id"))
                    if name == request_id:
                        found.append(row)
                    elif name == wanted or _NUMBER.sub("", name) == request_id:
                        alike.append(row)
        except OSError as error:
            if part == path and not readable:
                raise ValueError(f"cannot read the access log {path}: {error.strerror}") from error
    return iter(found or alike)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
