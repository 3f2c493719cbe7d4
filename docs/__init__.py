"""The site: pages in Markdown, and what is made for them. `conf.py` is Sphinx's, `docstrings.py` and
`generated.py` serve the reference; `pictures` and `gallery` make pictures and pages of plans."""
