"""The dashboard: a server that tells browsers how runs go, and the pages that show it (`client/`).

All of it is a fold over the journal, and files beside it. Starlette and uvicorn come with the extra `web`.
"""
