"""LoRA adapters over HTTP: served under their names, loaded and unloaded on every worker, never mixed up."""

import asyncio
import copy
from typing import Any

import httpx
import pytest
from fakes.cluster import MODEL, FakeCluster, cluster, served, until
from fakes.worker import FakeWorker, Faults, answer_text, revision_of

from kvstore.hashing import block_hashes, request_salt
from protocol.request import GenerationRequest, Sampling
from router.life import Blocks
from router.view import AdapterView, ClusterView, WorkerView

PROMPT = list(range(1, 101))


def pair(**fields: Any) -> list[FakeWorker]:
    return [FakeWorker(name, role, node, **copy.deepcopy(fields)) for name, role, node in (("p0", "prefill", "n0"), ("d0", "decode", "n1"))]


def web(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=20, verify=False)


async def ask(http: httpx.AsyncClient, model: str, max_tokens: int = 3) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": PROMPT, "max_tokens": max_tokens})


async def change(http: httpx.AsyncClient, action: str, name: str, path: str | None = None, timeout_s: float = 5) -> httpx.Response:
    body = {"lora_name": name} | ({} if path is None else {"lora_path": path})
    return await http.post(f"/v1/{action}_lora_adapter", json=body, headers={"x-request-timeout-s": str(timeout_s)})


async def names(http: httpx.AsyncClient) -> dict[str, Any]:
    return {model["id"]: model["parent"] for model in (await http.get("/v1/models")).json()["data"]}


async def test_loaded_served_listed_unloaded() -> None:
    workers = pair()
    async with cluster(workers, adapter_changes=True) as made, served(made) as url, web(url) as http:
        assert (await ask(http, "sql")).status_code == 404
        reply = await change(http, "load", "sql", "/adapters/sql")
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert await names(http) == {MODEL: None, "sql": MODEL}
        model = (await http.get("/v1/models/sql")).json()
        assert (model["root"], model["revision"]) == ("/adapters/sql", revision_of("/adapters/sql"))
        answer = (await ask(http, "sql")).json()
        assert answer["model"] == "sql" and answer["choices"][0]["text"] == "".join(
            f"sql:t{t} " for t in map(int, answer_text(PROMPT, 3).replace("t", "").split())
        )
        assert (await ask(http, MODEL)).json()["choices"][0]["text"] == answer_text(PROMPT, 3)
        assert [one.request.adapter for worker in workers for one in [*worker.prefills, *worker.decodes]] == ["sql", "", "sql", ""]
        again = await change(http, "load", "sql", "/adapters/sql")
        assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
        gone = await change(http, "unload", "sql")
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert (await change(http, "unload", "sql")).status_code == 404 and (await ask(http, "sql")).status_code == 404
        assert await names(http) == {MODEL: None} and not any(worker.adapters for worker in workers)
        assert made.metric("headrace_adapter_calls_total") == 4


@pytest.mark.parametrize(
    "body,field", [({"lora_name": "x"}, "lora_path"), ({"lora_path": "/x"}, "lora_name"), ({"lora_name": MODEL, "lora_path": "/x"}, "lora_name")]
)
async def test_bad_loads(body: dict[str, Any], field: str) -> None:
    async with cluster(pair(), adapter_changes=True) as made, served(made) as url, web(url) as http:
        reply = await http.post("/v1/load_lora_adapter", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        assert (await http.post("/v1/load_lora_adapter", json={"lora_name": "a b", "lora_path": "/x"})).status_code == 400
        assert (await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/x", "load_inplace": True})).status_code == 400


async def test_changes_are_off_unless_allowed() -> None:
    async with cluster(pair(adapters={"sql": "/a"})) as made, served(made) as url, web(url) as http:
        assert (await change(http, "load", "new", "/b")).status_code == 404
        assert (await change(http, "unload", "sql")).status_code == 404
        assert (await ask(http, "sql")).status_code == 200


@pytest.mark.parametrize("code,status", [("invalid_request", 400), ("overloaded", 429)])
async def test_a_load_that_fails_somewhere_is_undone_everywhere(code: str, status: int) -> None:
    p0, d0 = pair()
    d0.refuses_adapters = code
    async with cluster([p0, d0], adapter_changes=True) as made, served(made) as url, web(url) as http:
        reply = await change(http, "load", "sql", "/a")
        assert (reply.status_code, reply.json()["error"]["message"]) == (status, "as told")
        assert p0.adapter_calls == ["load_adapter sql", "unload_adapter sql"] and not p0.adapters
        d0.refuses_adapters = ""
        assert (await change(http, "load", "sql", "/a")).status_code == 200


async def test_a_worker_that_does_not_answer_costs_the_deadline() -> None:
    p0, d0 = pair()
    async with cluster([p0, d0], adapter_changes=True, stall_s=30) as made, served(made) as url, web(url) as http:
        d0.frozen = True
        reply = await change(http, "load", "sql", "/a", timeout_s=0.2)
        assert reply.status_code == 504
        await made.workers["d0"].stop()  # and one whose stream breaks ends the waiting at once
        d0.frozen = False


async def test_unload_waits_for_the_requests_and_refuses_new_ones() -> None:
    workers = pair(adapters={"sql": "/a"}, token_s=0.02)
    async with cluster(workers, adapter_changes=True) as made, served(made) as url, web(url) as http:
        running = asyncio.create_task(ask(http, "sql", 40))
        await until(lambda: any(worker.running for worker in workers))
        late = await change(http, "unload", "sql", timeout_s=0.05)
        assert late.status_code == 504 and "1 requests still use" in late.json()["error"]["message"]
        assert (await ask(http, "sql")).status_code == 200  # it stays
        unloading = asyncio.create_task(change(http, "unload", "sql"))
        await until(lambda: "sql" not in made.service.adapters.served())
        assert (await ask(http, "sql")).status_code == 404 and all("sql" in worker.adapters for worker in workers)
        assert (await running).status_code == 200 and (await unloading).status_code == 200
        assert not any(worker.adapters for worker in workers)


async def test_only_workers_that_have_the_adapter_get_its_requests() -> None:
    with_it, without, other = FakeWorker("a", adapters={"sql": "/a"}), FakeWorker("b"), FakeWorker("c", adapters={"sql": "/other-weights"})
    twin = FakeWorker("d", adapters={"sql": "/a"}, faults=Faults(error="overloaded", times=3))
    async with cluster([with_it, without, other, twin], policy="least_loaded") as made, served(made) as url, web(url) as http:
        assert [(await ask(http, "sql")).status_code for _ in range(8)] == [200] * 8
        assert not without.decodes and not other.decodes and len(with_it.decodes) >= 5
        await with_it.stop()
        await twin.stop()
        await until(lambda: made.service.adapters.served().get("sql") == AdapterView("sql", revision_of("/other-weights"), "/other-weights"))


async def test_workers_that_come_later_are_told() -> None:
    async with cluster(pair(), adapter_changes=True) as made, served(made) as url, web(url) as http:
        following = asyncio.create_task(made.service.adapters.follow())
        assert (await change(http, "load", "sql", "/a")).status_code == 200
        late, broken = FakeWorker("late", generation=2), FakeWorker("broken", refuses_adapters="invalid_request")
        for worker in (late, broken):
            await worker.start()
            made.registry.listed.append(worker.member)
        await until(lambda: late.adapters == {"sql": "/a"} and bool(broken.adapter_calls))
        await asyncio.sleep(0.2)
        assert broken.adapter_calls == ["load_adapter sql"]  # once: it will not get better
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        for worker in (late, broken):
            await worker.stop()


async def _blocks(made: FakeCluster, **fields: str) -> tuple[bytes, ...]:
    return Blocks.of_cluster(made.membership.view(), GenerationRequest("r", tuple(PROMPT), Sampling(max_tokens=1), 0.0, **fields)).of(tuple(PROMPT))  # type: ignore[arg-type]


async def test_blocks_are_named_as_in_the_engines() -> None:
    async with cluster(pair()) as made:
        chains = [await _blocks(made), *[await _blocks(made, adapter=name, adapter_revision=revision) for name, revision in ("a1", "a2", "b1")]]
        assert len(set(chains)) == 4
        assert chains[1] == tuple(block_hashes(PROMPT, 64, request_salt("rev/layout", "", "a", "1")))


def test_where_workers_disagree_most_of_them_decide() -> None:
    old, new = AdapterView("sql", "old", "/a"), AdapterView("sql", "new", "/a")
    workers = [WorkerView(str(index), 1, "both", "n0", adapters=(adapter,)) for index, adapter in enumerate((old, new, new))]
    view = ClusterView((*workers, WorkerView("ill", 1, "both", "n0", trouble="stalled", adapters=(old, AdapterView("other", "r", "/o")))))
    assert view.adapters == {"sql": new}
    assert [worker.name for worker in view.serving("sql", "new").workers] == ["1", "2"]
    assert view.serving("", "") is view
