import pytest

from jaxblt.parallel.launch import Launch, find_launch, first_host

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
FLAGS = {"JAXBLT_COORDINATOR": "head:9000", "JAXBLT_NUM_PROCESSES": "4", "JAXBLT_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("rack3-n[1,4]-ib,other", "rack3-n1-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("env", "arguments", "expected"),
    [
        ({}, {}, None),
        ({"JAXBLT_NUM_PROCESSES": "1"}, {}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}, None),
        (POD, {}, None),
        ({}, {"coordinator": "a:1", "num_processes": 2, "process_id": 1}, ("a:1", 2, 1, None)),
        (FLAGS, {}, ("head:9000", 4, 0, None)),
        (FLAGS | {"JAXBLT_COORDINATOR": "head"}, {}, ("head:8476", 4, 0, None)),
        (FLAGS, {"process_id": 3}, ("head:9000", 4, 3, None)),
        (SLURM, {}, ("gpu07:61441", 16, 3, 3)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "5"}, {}, ("gpu07:61441", 16, 3, None)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, {}, ("gpu07:61441", 16, 3, 3)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)"}, {}, ("gpu07:61441", 16, 3, None)),
        (SLURM | FLAGS, {}, ("head:9000", 4, 0, 3)),
        (MPI, {}, ("127.0.0.1:61440", 4, 1, 1)),
        (
            MPI | {"OMPI_MCA_orte_hnp_uri": "1531576321.0;tcp://10.96.0.1,10.1.0.1:34911"},
            {},
            (f"10.96.0.1:{61440 + 1531576321 % 4096}", 4, 1, 1),
        ),
        (
            POD | {"JAXBLT_COORDINATOR": "train-workers-0-0.train:1234", "JAXBLT_NUM_PROCESSES": "4"},
            {},
            ("train-workers-0-0.train:1234", 4, 2, None),
        ),
    ],
)
def test_launch(env: dict[str, str], arguments: dict, expected: tuple | None) -> None:
    found = find_launch(env, **arguments)
    if expected is None:
        assert found is None
    else:
        assert isinstance(found, Launch)
        assert (found.coordinator, found.num_processes, found.process_id, found.local_device) == expected


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"JAXBLT_COORDINATOR": "head:1"}, ["num_processes and process_id", "JAXBLT_NUM_PROCESSES"]),
        (
            {"JAXBLT_NUM_PROCESSES": "2", "JAXBLT_PROCESS_ID": "0"},
            ["coordinator unknown", "JAXBLT_COORDINATOR"],
        ),
        (FLAGS | {"JAXBLT_PROCESS_ID": "4"}, ["process_id=4", "0 to 3"]),
        (FLAGS | {"JAXBLT_NUM_PROCESSES": "four"}, ["num_processes='four'", "whole number"]),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["coordinator unknown"]),
    ],
)
def test_what_is_missing_is_named(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        find_launch(env)
    assert all(word in str(caught.value) for word in words), str(caught.value)
