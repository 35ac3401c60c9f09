"""What a server tells about itself: metrics, the live view of its engines, timelines of requests, spans.

traffic.py     requests by endpoint and outcome: counted once, where they come and go
tally.py       histograms that cost little where they are filled
figures.py     what one engine core has done, added up from its events
rates.py       what it did in the last seconds
watch.py       `CoreWatch`: the one subscriber of a core: its view, figures, timelines and readers
live.py        `Reader`: a connection that follows the engines, with bounded memory
names.py       whose names a caller may see
shapes.py      snapshots and events as JSON, and back
explained.py   where a request's time went, and why, in words
telemetry.py   `Telemetry`: all of it for one server; attach and detach models
metrics.py     Prometheus' form of the figures
schemas.py     the shapes of answers, for the OpenAPI document
routes.py      /metrics, /v1/scheduler, /v1/scheduler/events, /v1/requests/{id}/timeline
spans.py       OpenTelemetry, if it is asked for
"""
