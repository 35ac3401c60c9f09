"""tokenmill on a cluster: Ray Serve places, routes, restarts and scales servers that share a PostgreSQL store."""
