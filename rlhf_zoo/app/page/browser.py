"""Scripts that the page adds to Gradio's own: for screen readers, for scrolling to results, and for links."""

from typing import Any

import gradio as gr

#: Options of events that belong to the page: its API does not list them, and they show no progress bar.
PAGE_EVENT: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}

# A screen reader announces changes only inside an element that stays, and Gradio replaces the content of a component.
_LIVE_REGION_SCRIPT = "element.closest('.block').setAttribute('aria-live', 'polite')"


def create_live_region(elem_id: str) -> gr.HTML:
    """Creates an empty HTML component whose changes screen readers announce.

    Args:
        elem_id: Id of the element.
    """
    return gr.HTML("", elem_id=elem_id, js_on_load=_LIVE_REGION_SCRIPT)


def scroll_script(elem_id: str, *, control_id: str = "") -> str:
    """Returns JavaScript that scrolls to an element unless its top is in the upper half of the window.

    Gradio's own `scroll_to_output` has no effect in 6.31.

    Args:
        elem_id: Id of the element.
        control_id: Id of a control just above it that stays in view too, if any.
    """
    return f"""() => {{
  const top = document.getElementById('{elem_id}').getBoundingClientRect().top;
  if (top < 0 || top > innerHeight / 2)
    document.getElementById('{control_id or elem_id}').scrollIntoView({{ block: 'start' }});
}}"""


#: JavaScript that passes the query of the page's address to an event's function.
QUERY_SCRIPT = "() => [location.search]"

#: JavaScript that clicks the button to sample, once the prompt and settings of a link are filled in. It waits for the
#: button, because Gradio draws a tab only when the tab is first opened.
FOLLOW_LINK_SCRIPT = """() => {
  const query = new URLSearchParams(location.search);
  if (!query.has('prompt')) return;
  const id = query.has('step') ? 'at-the-step' : 'compare';
  let tries = 300;
  const click = () => {
    const button = document.getElementById(id);
    if (button && button.offsetParent) button.click();
    else if (tries-- > 0) setTimeout(click, 100);
  };
  setTimeout(click, 100);
}"""
