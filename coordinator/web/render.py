"""Pages from templates: every value is escaped, cleaned and bounded, whatever agents have written into it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from edge_agent.core.time_and_text import show_time

from ..report.charts import Chart, clean, figure_html
from ..report.page import templates_of
from .asset_files import address
from .served import Site

if TYPE_CHECKING:
    import jinja2


MOST_TEXT = 2000
"""Characters of one value that a page shows; a fault's message is the longest."""


def site_of(request: Request) -> Site:
    """Return what the pages share."""
    site: Site = request.app.state.site
    return site


def page(request: Request, template: str, *, topic: str = "", code: int = 200, **content: Any) -> HTMLResponse:
    """Return a page; ``topic``: what it has to be fetched again for, see `FolderView.version`. Hold the view's lock."""
    site = site_of(request)
    view = site.view
    cookie = request.cookies.get(site.cookie, "")
    is_signed_in = site.access is not None and site.access.is_session(cookie)
    text = (
        _templates()
        .get_template(template)
        .render(
            path=request.url.path,
            topic=topic,
            code=code,
            seen=view.version(topic) if topic else "",
            view=view,
            can_act=site.access is not None,
            is_signed_in=is_signed_in,
            form_token=site.access.form_token(cookie) if site.access is not None and is_signed_in else "",
            now=view.now().timestamp(),
            **content,
        )
    )
    return HTMLResponse(text, code, {"cache-control": "no-store"})


def warm() -> None:
    """Compile all templates, so that the first visitor does not wait for it."""
    for name in _templates().list_templates():
        _templates().get_template(name)


def figures(charts: dict[str, Chart]) -> list[Markup]:
    """Return the HTML of charts by their ids."""
    return [Markup(figure_html(chart, name)) for name, chart in charts.items()]  # noqa: S704 - it escapes all values


@functools.cache
def _templates() -> jinja2.Environment:
    """Return the templates of the pages, with their filters and the address of assets."""
    templates = templates_of(__package__, _shown)
    templates.filters.update(
        {
            "moment": show_time,
            "clock": lambda at: show_time(at).removesuffix(" UTC"),
            "dash": lambda value: "–" if value in {None, ""} else value,
        }
    )
    templates.globals["asset"] = address
    return templates


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup | int | float) else clean(value, MOST_TEXT)
