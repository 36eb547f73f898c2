"""The HTTP service: it ranks live requests and takes events and attributes into the feature store.

`app` has the routes of a worker process, `worker` implements them, `rank` ranks a request
(shared with the in-process `ranking.Ranker`), `loaded_rankers` the live rankers of all surfaces,
`admission` and `auth` the access checks, and `server` the processes, connections and health.
"""
