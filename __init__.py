"""thinpipe: what compressing pipeline traffic buys over a slow network, and what it costs."""

__version__ = "0.1.0"
