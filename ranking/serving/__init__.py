"""The HTTP service: it ranks live requests and takes events and attributes into the feature store.

`app` has the routes of a worker process, `worker` what they call, `rank` the ranking of one request
(shared with the in-process `ranking.Ranker`), `loaded_rankers` the live rankers of all surfaces,
`admission` and `auth` what is let in, and `server` the processes, connections and health.
"""
