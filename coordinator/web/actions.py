"""What an operator does with a token: each action has a page that says what will happen, and a form that does it.

The functions are those of the commands. A form counts only with a session, from a page of this server, with that
session's form token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from edge_agent.core.errors import UsageError
from edge_agent.identity.certificates import show_utc

from ..fleet import release_commands as commands
from ..runs.cancel import cancel_run
from ..state.store import StateFolder
from .access import SESSION_S, Access, is_own_origin
from .render import page, site_of

MOST_FORM_BYTES = 16384
MOST_FIELDS = 20
MOST_REASON = 500
LOOK_EVERY_S, LOOKS = 0.1, 20
"""How long a cancelled run is waited for; the request stays."""

TOKEN_LIFE = timedelta(days=14)

Form = Mapping[str, str]


@dataclass(frozen=True)
class Action:
    """One thing that can be done. Texts take the form's fields."""

    title: str
    effect: str
    fields: tuple[str, ...] = ()
    """Fields that people fill in, beside those in the address."""

    required: tuple[str, ...] = ()
    is_harmful: bool = False
    back: Callable[[Form], str] = lambda form: f"/releases?{urlencode({'number': form.get('number', '')})}"


def _of_agent(form: Form) -> str:
    return f"/agent?{urlencode({'id': form.get('agent', '')})}"


ACTIONS: dict[str, Action] = {
    "promote": Action(
        "Promote release {number}",
        "All devices of its channel get it, new ones included. 'headwater release promote {number}' does the same.",
    ),
    "hold": Action(
        "Hold release {number}",
        "No further device gets it; those that run it keep it. 'headwater release hold {number}' does the same.",
        ("reason",),
    ),
    "resume": Action(
        "Resume release {number}",
        "It continues, and failures before this do not count any more. 'headwater release resume {number}' does the "
        "same.",
    ),
    "rollback": Action(
        "Roll back release {number}",
        "All devices that run it return to the release before it, whatever its accuracy. That is a new release of the "
        "older bundle. 'headwater release rollback {number}' does the same.",
        ("reason",),
        is_harmful=True,
    ),
    "pin": Action(
        "Pin {agent}",
        "It stays with this release, whatever is released, held or rolled back, until the pin ends. Pinned to an older "
        "release, it goes back to that one.",
        ("number", "reason", "until"),
        ("reason",),
        back=_of_agent,
    ),
    "unpin": Action("End the pin of {agent}", "It follows its channel again.", back=_of_agent),
    "cancel": Action(
        "Cancel {run}",
        "It ends for good: nothing more is asked of agents for it, and the next run begins. Its closed rounds stay, "
        "and can be exported. 'headwater cancel {run}' does the same.",
        is_harmful=True,
        back=lambda form: f"/run?{urlencode({'id': form.get('run', '')})}",
    ),
    "revoke": Action(
        "Revoke {agent}",
        "Its certificates count no more, and its session ends within seconds. A new token lets a device in under this "
        "name again. 'headwater agents revoke {agent}' does the same.",
        is_harmful=True,
        back=_of_agent,
    ),
    "enroll": Action(
        "Make a token for {agent}",
        "A device that was wiped or replaced gets the name back with it. The token counts once, for 14 days, and is "
        "shown once; the older certificate is revoked when it is used. 'headwater enroll {agent}' does the same.",
        back=_of_agent,
    ),
}

IN_ADDRESS = ("do", "number", "agent", "run")


async def login(request: Request) -> Response:
    """Return the form for the token, and the session that it begins."""
    site = site_of(request)
    if request.method == "GET":
        return page(request, "login.html", next=_safe(request.query_params.get("next", "/")), message="")
    if site.access is None:
        raise HTTPException(403, "Nobody can act here: the state folder cannot be written, so there is no token.")
    form = await _form(request)
    address = request.client.host if request.client is not None else ""
    following = _safe(form.get("next", "/"))
    if not site.access.is_token(form.get("token", "").strip()):  # the right one counts, however many wrong ones came
        if site.wrong.are_too_many(address):
            message = "Too many wrong tokens; try again in half a minute."
            return page(request, "login.html", code=429, next=following, message=message)
        site.wrong.note(address)
        message = "This is not the token; it is in the file web/token of the coordinator's state folder."
        return page(request, "login.html", code=403, next=following, message=message)
    answer = RedirectResponse(following, 303, {"cache-control": "no-store"})
    answer.set_cookie(
        site.cookie,
        site.access.session(),
        max_age=int(SESSION_S),
        path="/",
        secure=site.is_secure,
        httponly=True,
        samesite="strict",
    )
    return answer


async def logout(request: Request) -> Response:
    """End the session of this browser."""
    await _signed(request)
    site = site_of(request)
    answer = RedirectResponse("/", 303)
    if site.access is not None:
        await run_in_threadpool(site.access.end, request.cookies.get(site.cookie, ""))
    answer.delete_cookie(site.cookie, path="/", secure=site.is_secure, httponly=True, samesite="strict")
    return answer


async def act(request: Request) -> Response:
    """Return what an action will do, and the action itself."""
    if request.method == "GET":
        site = site_of(request)
        in_address = {name: request.query_params.get(name, "")[:200] for name in IN_ADDRESS}
        action = _action(in_address)
        if site.access is None or not site.access.is_session(request.cookies.get(site.cookie, "")):
            return RedirectResponse(f"/login?{urlencode({'next': f'/act?{request.url.query}'})}", 303)
        return await run_in_threadpool(_show_form, request, action, in_address)
    form: Form = await _signed(request)
    action = _action(form)
    missing = [name for name in action.required if not form.get(name, "").strip()]
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given; go back and fill it in")
    token = await run_in_threadpool(_perform, request, form)
    if token is not None:
        name = form["agent"]
        return page(
            request,
            "token.html",
            agent=name,
            token=token.text(),
            authority=token.authority,
            expires=show_utc(token.expires),
        )
    site_of(request).watch.wake()
    await run_in_threadpool(site_of(request).view.refresh, wait=True)  # the page that follows shows what was done
    return RedirectResponse(action.back(form), 303)


# --- inside ----------------------------------------------------------------------------------------------------------


def _show_form(request: Request, action: Action, form: Form) -> Response:
    """Return the page that says what an action will do, with the form that does it."""
    site = site_of(request)
    with site.view.lock:
        releases = [release for release in reversed(site.view.book.releases) if not release.rolled_back_by][:20]
        return page(
            request,
            "act.html",
            title=action.title.format_map(_Bounded(form)),
            effect=action.effect.format_map(_Bounded(form)),
            action=action,
            form=form,
            back=action.back(form),
            releases=releases,
        )


class _Bounded(dict[str, str]):
    """Fields for a text; braces in a value are no fields, and a missing one is empty."""

    def __missing__(self, key: str) -> str:
        return ""


def _perform(request: Request, form: Form) -> Any:
    """Do what a form asks for; return the token of a device where that was asked for, otherwise None."""
    site = site_of(request)
    if form["do"] in {"revoke", "enroll"}:
        return _change_certificates(site.enrolment, form)
    with StateFolder(site.view.path).look() as folder:
        _change_folder(folder, form)
    return None


def _change_certificates(open_enrolment: Callable[[], Any] | None, form: Form) -> Any:
    """Make a token for a device and return it, or revoke its certificates.

    Raises:
        UsageError: agents have no certificates here (``open_enrolment`` is None), or the name is none.
    """
    if open_enrolment is None:
        raise UsageError(
            "agents have certificates only where the configuration has the section [identity]; start the view with "
            "'headwater web --config FILE' of such a coordinator"
        )
    issuer = open_enrolment()
    agent = form.get("agent", "")
    if form["do"] == "enroll":
        return issuer.token(agent, TOKEN_LIFE)
    issuer.revoke(agent)
    return None


def _change_folder(folder: StateFolder, form: Form) -> None:
    """Do what a form asks for that is written into the state folder, as the command of that name does it."""
    name = form["do"]
    by = f"{commands.current_user()}, web view"
    reason = form.get("reason", "").strip()[:MOST_REASON]
    if name == "promote":
        commands.promote(folder, _number(form), by)
    elif name == "hold":
        commands.hold(folder, _number(form), reason, by)
    elif name == "resume":
        commands.resume(folder, _number(form), by)
    elif name == "rollback":
        commands.rollback(folder, _number(form), reason, by)
    elif name == "pin":
        number = _number(form) if form.get("number") else None
        commands.pin(folder, form.get("agent", ""), number, reason, form.get("until", "").strip(), by)
    elif name == "unpin":
        commands.unpin(folder, form.get("agent", ""), by)
    else:
        pause = threading.Event()
        cancel_run(folder, form.get("run", ""), lambda: pause.wait(LOOK_EVERY_S), LOOKS, f"by {by}")


def _number(form: Form) -> int:
    """Return the number of a release.

    Raises:
        UsageError: there is none in the form.
    """
    digits = form.get("number", "")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        raise UsageError(f"'{digits[:40]}' is no number of a release")
    return int(digits)


def _action(form: Form) -> Action:
    if (action := ACTIONS.get(form.get("do", ""))) is None:
        raise HTTPException(404, "There is no such action.")
    return action


async def _signed(request: Request) -> Form:
    """Return the fields of a form that a session of this server has sent.

    Raises:
        HTTPException: it has not.
    """
    site = site_of(request)
    cookie = request.cookies.get(site_of(request).cookie, "")
    form = await _form(request)
    access: Access | None = site.access
    if access is None or not access.is_session(cookie):
        raise HTTPException(403, "Actions need the token of this coordinator. Sign in with it first.")
    if not access.is_form_token(form.get("form_token", ""), cookie):
        raise HTTPException(403, "This form is of another session; open its page again.")
    return form


async def _form(request: Request) -> Form:
    """Return the fields of a form from a page of this server.

    Raises:
        HTTPException: it is from elsewhere, or too large.
    """
    if not is_own_origin(request.headers.get("origin", ""), request.headers.get("host", "")):
        raise HTTPException(403, "This form was not sent by a page of this server.")
    if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
        raise HTTPException(415, "Expected a form.")
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_FORM_BYTES:
            raise HTTPException(413, f"This form is longer than {MOST_FORM_BYTES} bytes.")
    try:
        pairs = parse_qsl(content.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise HTTPException(400, "This form has too many fields.") from error
    return dict(pairs)


def _safe(address: str) -> str:
    """Return an address of this server; another one becomes the first page."""
    is_own = address.startswith("/") and not address.startswith(("//", "/\\")) and len(address) < 2000
    return address if is_own and address.isprintable() and "\\" not in address else "/"
