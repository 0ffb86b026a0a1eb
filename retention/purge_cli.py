"""The commands that take things away for good: purge, resume, verify and keygen.

Owns their options, their confirmation and the receipt's file. Decides nothing itself: ``purge`` chooses what goes,
``receipt`` signs, the store erases. Invariants: without ``--apply`` nothing is removed; a receipt is written whatever
came of the order, since it says which nodes have not carried it out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvstore.purges import PurgeOrder
from kvstore.units import parse_duration_s
from retention import report
from retention.errors import NothingMatched, SelectionInvalid
from retention.options import ApplyOption, DeadlineOption, JsonOption, StoreOption, TokenOption, YesOption
from retention.policy_cli import AuthorOption, me
from retention.prefixes import opaque_note, read_tokens, tokens_of_text
from retention.purge import Purge, has_holds, refuse_held, with_holds
from retention.receipt import read_public_key, read_receipt, read_secret_key, sign_receipt, write_key
from retention.selection import Selection, Why, order_of, purge_of
from retention.session import EXIT_FAILED, EXIT_LEFT, Session, Sessions, confirm, dry_hint, exit_codes

SpaceOption = Annotated[str | None, typer.Option("--space", help="Everything of one space (id or digits).")]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Every space of a tenant, by its name.")]
PrefixOption = Annotated[str | None, typer.Option("--prefix", help="A block's key: the block and all that extends it.")]
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="FILE|LIST", help="A prefix by its token ids: 1,15,27, or a file of them."),
]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="A prefix by its text, through the model's --tokenizer.", metavar="FILE")
]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="DIR", help="The model's directory, for --text.")
]
RenderedOption = Annotated[
    bool, typer.Option("--rendered", help="The text is what a chat template made: control tokens in it count.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Whose spaces tokens or text are looked for in; default: of all.")
]
FromStartOption = Annotated[
    bool, typer.Option("--from-start", help="With tokens or text: every block of it, also what others begin with.")
]
ClassOption = Annotated[
    str | None,
    typer.Option("--class", metavar="NAME", help="What a traffic class (its name, or its byte) alone has used."),
]
OlderOption = Annotated[
    str | None,
    typer.Option("--older-than", metavar="DURATION", help="What was written longer ago than this, like 30d."),
]
SignOption = Annotated[
    Path | None, typer.Option("--sign-key", envvar="REPRISE_SIGN_KEY", help="Secret key, as `keygen` makes it.")
]


def add_purge(app: typer.Typer, sessions: Sessions) -> None:
    @app.command()
    def purge(
        space: SpaceOption = None,
        tenant: TenantOption = None,
        prefix: PrefixOption = None,
        tokens: TokensOption = None,
        text: TextOption = None,
        tokenizer: TokenizerOption = None,
        rendered: RenderedOption = False,
        model: ModelOption = None,
        from_start: FromStartOption = False,
        traffic_class: ClassOption = None,
        older_than: OlderOption = None,
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
        """Remove blocks for good, by space, tenant, prefix, class or age.

        With a prefix goes all that extends it; states go with their blocks. Of a prefix by tokens or text the last
        whole block counts, and the blocks before it stay, unless --from-start. Blocks that other classes use, too, stay
        for them; age counts from when a block was written. Nothing is removed while one of the
        nodes does not answer, except with --proof: then those that answer erase every byte, and the receipt names the
        others.
        """
        if (proof is None) != (sign_key is None):
            raise typer.BadParameter("--proof and --sign-key FILE go together; `retention keygen FILE` makes a key")
        with sessions.open(store, token_file, deadline, as_json) as session:
            ids = _tokens_of(tokens, text, tokenizer, rendered=rendered)
            age_s = None if older_than is None else parse_duration_s(older_than)
            selection = Selection(space, tenant, prefix, ids, model, from_start, traffic_class, age_s)
            why = Why(author or me(), reason, overwrite)
            try:
                if apply and proof is not None and sign_key is not None:
                    order, opaque_spaces = order_of(session, selection, why)
                    if opaque_spaces:
                        typer.echo(opaque_note(opaque_spaces), err=True)
                    confirm(f"purge {_extent(order)} to the last byte?", yes=yes)
                    _carry_out(session, order, proof, sign_key)
                    return
                run = purge_of(session, selection, why)
                asks = not yes and sys.stdin.isatty()
                if apply and (asks or has_holds(session.store, deadline_s=session.deadline_s)):
                    foreseen = _foreseen(session, run)
                    if asks:
                        typer.echo(report.purge_line(foreseen), err=True)
                    refuse_held(foreseen)  # one in the last space or node, before the first one is emptied
                    confirm("purge for good?", yes=yes)
                result = run(True) if apply else _foreseen(session, run)
            except NothingMatched as error:
                nothing = Purge(apply, {}, 0, whole_spaces=selection.whole_spaces, opaque_spaces=error.opaque_spaces)
                session.show(report.purge_json(nothing))
                raise
            hint = () if result.holds else dry_hint(apply)
            session.show(report.purge_json(result), report.purge_line(result), *hint)
            refuse_held(result)

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
            confirm(f"purge {_extent(order)} to the last byte, where that is not done yet?", yes=yes)
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


def _tokens_of(
    tokens: str | None, text: Path | None, tokenizer: Path | None, *, rendered: bool
) -> tuple[int, ...] | None:
    """The token ids of a prefix that is given so, or as a text. Raises SelectionInvalid or PackageMissing."""
    if tokens is not None and text is not None:
        raise SelectionInvalid("give exactly one of --tokens and --text")
    if (text is None) != (tokenizer is None):
        raise SelectionInvalid("--text FILE and --tokenizer DIR go together")
    if text is None and rendered:
        raise SelectionInvalid("--rendered goes with --text")
    if text is not None and tokenizer is not None:
        return tokens_of_text(text, tokenizer, rendered=rendered)
    return None if tokens is None else read_tokens(tokens)


def _foreseen(session: Session, run: Callable[[bool], Purge]) -> Purge:
    """What a purge would remove, and the legal holds that forbid it."""
    return with_holds(session.store, run(False), deadline_s=session.deadline_s)


def _extent(order: PurgeOrder) -> str:
    """How much an order covers, for a question."""
    spaces = f"{len(order.spaces)} spaces" if order.spaces else "all spaces"
    if order.class_byte is not None:
        return f"a class in {spaces}"
    return f"what is old in {spaces}" if order.written_until_s is not None else spaces


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
