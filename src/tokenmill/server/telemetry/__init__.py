"""What a server tells about itself: metrics, the live view of its engines, timelines of requests, spans.

figures.py    histograms, totals and rates of engine cores, and HTTP requests by endpoint and outcome
live.py       the live view: a core's snapshots and events as JSON and back, and the connections that follow it
timeline.py   where a request's time went, and why, in words; OpenTelemetry spans, if enabled
hub.py        `Telemetry`: all of it for one server; attaches and detaches models
metrics.py    the figures in Prometheus' format
"""
