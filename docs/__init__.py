"""The site: pages in Markdown, and what is made for them.

`conf.py` is Sphinx's. `docstrings.py`, `generated.py` and `links.py` serve the reference and the
pages; `pictures` and `gallery` make pictures and pages of plans.
"""
