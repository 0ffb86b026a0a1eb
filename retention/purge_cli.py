"""The commands that take things away for good: purge, resume, verify and keygen.

Owns their options, their confirmation and the receipt's file. Decides nothing itself: ``purge`` chooses what goes,
``receipt`` signs, the store erases. Invariants: without ``--apply`` nothing is removed; a receipt is written whatever
came of the order, since it says which nodes have not carried it out.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import StoreError
from kvstore.keys import Space, SpaceId
from kvstore.purges import PURGE_KEYS_MAX, PurgeOrder
from retention import report
from retention.errors import NothingMatched, SelectionInvalid
from retention.options import ApplyOption, DeadlineOption, JsonOption, StoreOption, TokenOption, YesOption
from retention.policy_cli import AuthorOption, me
from retention.purge import (
    Purge,
    home_of,
    match_space,
    parse_key,
    plan_prefix,
    purge_prefix,
    purge_spaces,
    spaces_of_tenant,
)
from retention.receipt import read_public_key, read_receipt, read_secret_key, sign_receipt, write_key
from retention.scan import scan_blocks
from retention.session import EXIT_FAILED, EXIT_LEFT, Session, Sessions, confirm, dry_hint, exit_codes

SpaceOption = Annotated[str | None, typer.Option("--space", help="Everything of one space (id or digits).")]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Every space of a tenant, by its name.")]
PrefixOption = Annotated[str | None, typer.Option("--prefix", help="A block's key: the block and all that extends it.")]
SignOption = Annotated[
    Path | None, typer.Option("--sign-key", envvar="REPRISE_SIGN_KEY", help="Secret key, as `keygen` makes it.")
]


def add_purge(app: typer.Typer, sessions: Sessions) -> None:
    @app.command()
    def purge(
        space: SpaceOption = None,
        tenant: TenantOption = None,
        prefix: PrefixOption = None,
        apply: ApplyOption = False,
        yes: YesOption = False,
        proof: Annotated[
            Path | None, typer.Option("--proof", help="Erase every byte, and write a signed receipt to this file.")
        ] = None,
        sign_key: SignOption = None,
        reason: Annotated[str, typer.Option("--reason", help="Why; the receipt says it.")] = "",
        author: AuthorOption = None,
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help="With --proof: write zeros over the bytes (slow).")
        ] = False,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "120s",
        as_json: JsonOption = False,
    ) -> None:
        """Remove the blocks of a space, a tenant or a prefix for good.

        With a prefix goes all that extends it; states go with their blocks. Nothing is removed while one of the nodes
        does not answer, except with --proof: then those that answer erase every byte, and the receipt names the others.
        """
        if sum(choice is not None for choice in (space, tenant, prefix)) != 1:
            raise typer.BadParameter("give exactly one of --space, --tenant and --prefix")
        if (proof is None) != (sign_key is None):
            raise typer.BadParameter("--proof and --sign-key FILE go together; `retention keygen FILE` makes a key")
        with sessions.open(store, token_file, deadline, as_json) as session:
            try:
                if apply and proof is not None and sign_key is not None:
                    order = _order_of(session, space, tenant, prefix, author or me(), reason, overwrite=overwrite)
                    confirm(f"purge {len(order.spaces)} spaces to the last byte?", yes=yes)
                    _carry_out(session, order, proof, sign_key)
                    return
                run = _purge_of(session, space, tenant, prefix)
                if apply and not yes and sys.stdin.isatty():
                    typer.echo(report.purge_line(run(False)), err=True)
                    confirm("purge for good?", yes=yes)
                result = run(apply)
            except NothingMatched:
                session.show(report.purge_json(Purge(apply, {}, 0, whole_spaces=prefix is None)))
                raise
            session.show(report.purge_json(result), report.purge_line(result), *dry_hint(apply))

    _add_receipts(app, sessions)


def _add_receipts(app: typer.Typer, sessions: Sessions) -> None:
    @app.command()
    def resume(
        receipt: Annotated[Path, typer.Argument(help="Receipt of a purge that some node has not carried out.")],
        sign_key: SignOption = None,
        yes: YesOption = False,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "120s",
        as_json: JsonOption = False,
    ) -> None:
        """Give the order of a receipt again, and write the receipt anew.

        Nodes that have carried it out do nothing.
        """
        if sign_key is None:
            raise typer.BadParameter("--sign-key FILE is needed: the receipt is signed anew")
        with sessions.open(store, token_file, deadline, as_json) as session:
            order = read_receipt(receipt).order
            confirm(f"purge {len(order.spaces)} spaces to the last byte, where that is not done yet?", yes=yes)
            _carry_out(session, order, receipt, sign_key)

    @app.command()
    def verify(
        receipt: Annotated[Path, typer.Argument(help="Receipt that `purge --proof` wrote.")],
        public_key: Annotated[
            Path | None, typer.Option("--public-key", help="Key that must have signed it; without, any.")
        ] = None,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "600s",
        as_json: JsonOption = False,
    ) -> None:
        """Search the disks for anything of a purge that is left.

        Checks the receipt's signature, then reads every segment of every node, believing no index.
        """
        with sessions.open(store, token_file, deadline, as_json) as session:
            trusted = read_public_key(public_key) if public_key is not None else None
            found = read_receipt(receipt, trusted)
            until_s = {name: done.began_s for name, done in found.reports.items()}
            left = session.store.leftovers(found.order, until_s, deadline_s=session.deadline_s)
            lines = report.leftovers_lines(found, left, trusted is not None)
            session.show(report.leftovers_json(found, left, trusted is not None), *lines)
            if any(item.records for item in left.answers.values()):
                raise typer.Exit(EXIT_LEFT)
            session.fail_for(left.failed)
            if not found.complete or any(item.unreadable for item in left.answers.values()):
                raise typer.Exit(EXIT_FAILED)

    @app.command()
    def keygen(
        file: Annotated[Path, typer.Argument(help="Where the secret key goes; the public one goes to FILE.pub.")],
    ) -> None:
        """Make a key that signs receipts."""
        with exit_codes():
            typer.echo(f"secret key {file}, public key {write_key(file)}")


def _known_spaces(session: Session) -> dict[SpaceId, Space]:
    """The spaces of every node that answers. Raises the error of one if none does."""
    found: dict[SpaceId, Space] = {}
    failures: list[StoreError] = []
    with session.each_node() as nodes:
        for node in nodes.values():
            try:
                found |= node.spaces(deadline_s=session.deadline_s / (2 * len(nodes)))
            except StoreError as error:
                failures.append(error)
        if len(failures) == len(nodes):
            raise failures[0]
    return found


def _carry_out(session: Session, order: PurgeOrder, proof: Path, sign_key: Path) -> None:
    """Give an order to every node, and write what came of it."""
    key = read_secret_key(sign_key)
    done = session.store.purge(order, deadline_s=session.deadline_s)
    data = sign_receipt(order, done.answers, done.failed, int(session.clock.now_s()), key)
    draft = proof.with_name(proof.name + ".new")
    draft.write_bytes(data)
    os.replace(draft, proof)
    receipt = read_receipt(proof)
    session.show(report.receipt_json(receipt), *report.receipt_lines(receipt, proof))
    session.fail_for(done.failed)


def _order_of(
    session: Session,
    space: str | None,
    tenant: str | None,
    prefix: str | None,
    author: str,
    reason: str,
    *,
    overwrite: bool,
) -> PurgeOrder:
    """What the chosen purge orders. Raises SelectionInvalid or NothingMatched."""
    store, deadline_s = session.store, session.deadline_s
    keys = None
    if prefix is not None:
        root = parse_key(prefix)
        home = home_of(store, root, deadline_s)
        keys = plan_prefix(root, scan_blocks(store, home, deadline_s=deadline_s)).keys
        spaces: tuple[SpaceId, ...] = (home,)
        if len(keys) > PURGE_KEYS_MAX:
            raise SelectionInvalid(
                f"{len(keys)} blocks extend this prefix; a purge with proof names {PURGE_KEYS_MAX} at most: choose a "
                "longer prefix, or purge the space"
            )
    else:
        spaces = _spaces_of(session, space, tenant, partly=True)
    now_s = int(session.clock.now_s())
    return PurgeOrder(secrets.token_hex(16), spaces, keys, now_s, author, reason, tenant or "", overwrite)


def _purge_of(session: Session, space: str | None, tenant: str | None, prefix: str | None) -> Callable[[bool], Purge]:
    """The chosen purge as a function of ``apply``. Raises before anything is removed when the choice is wrong."""
    store, deadline_s = session.store, session.deadline_s
    if prefix is not None:
        root = parse_key(prefix)
        return lambda apply: purge_prefix(store, root, apply=apply, deadline_s=deadline_s)
    chosen = _spaces_of(session, space, tenant)
    return lambda apply: purge_spaces(store, chosen, apply=apply, deadline_s=deadline_s)


def _spaces_of(session: Session, space: str | None, tenant: str | None, *, partly: bool = False) -> tuple[SpaceId, ...]:
    """Spaces as the nodes know them, all nodes or (``partly``) those that answer."""
    spaces = _known_spaces(session) if partly else session.store.spaces(deadline_s=session.deadline_s)
    return spaces_of_tenant(tenant, spaces) if tenant is not None else (match_space(space or "", spaces),)
