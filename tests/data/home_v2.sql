-- A home of database layout 2 and event schema 1: a run that is done, and one that --max-duration stopped,
-- of examples/mybench in @FOLDER@. It must open for ever: never edit it once released.
PRAGMA application_id = 1165380678;
PRAGMA user_version = 2;
BEGIN TRANSACTION;
CREATE TABLE event (
    stream TEXT NOT NULL,
    seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    v INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (stream, seq)
) STRICT, WITHOUT ROWID;
INSERT INTO "event" VALUES('first',1,0,1,1794812646660487,'RunPlanned','{"kind":"RunPlanned","plan":{"run":"first","benchmark":"mybench","places":["local"],"benchmark_spec":{"kind":"command","spec":{"command":["python3","agent.py"],"digest":"40625d62ecfb8b17f81317973db64375552a39d446f71776cb1c6af933b27233","files":["agent.py"],"name":"mybench","needs":{},"root":"@FOLDER@"}},"place_specs":{"local":{"base":"@FOLDER@","kind":"local","settings":{}}},"settings":{},"agent":{},"limits":{"workers":2,"boot_timeout_s":1800.0},"verdict":{},"home":"1d9v9g"},"total":6}');
INSERT INTO "event" VALUES('first',2,0,1,1794812646660487,'TasksPlanned','{"kind":"TasksPlanned","tasks":[{"id":"add_1","domain":"add","params":{"answer":"5","question":"2 + 3"},"timeout_s":10.0,"stall_s":0.0},{"id":"add_2","domain":"add","params":{"answer":"42","question":"17 + 25"},"timeout_s":10.0,"stall_s":0.0},{"id":"add_3","domain":"add","params":{"answer":"676","question":"640 + 36"},"timeout_s":10.0,"stall_s":0.0},{"id":"times_1","domain":"times","params":{"answer":"4","question":"2 * 2"},"timeout_s":10.0,"stall_s":0.0},{"id":"times_2","domain":"times","params":{"answer":"42","question":"6 * 7"},"timeout_s":10.0,"stall_s":0.0},{"id":"times_3","domain":"times","params":{"answer":"144","question":"12 * 12"},"timeout_s":10.0,"stall_s":0.0}]}');
INSERT INTO "event" VALUES('first',3,1,1,1794812646694725,'ControllerStarted','{"kind":"ControllerStarted","host":"vm","pid":14681,"version":"0.1.0"}');
INSERT INTO "event" VALUES('first',4,1,1,1794812646744433,'MachineRequested','{"kind":"MachineRequested","machine":"first-1d9v9g-1","name":"worker-1","lane":0,"offer":{"place":"local","size":"process","usd_per_hour":0.0,"billing_step_s":1.0},"expires_at":1794827046744433}');
INSERT INTO "event" VALUES('first',5,1,1,1794812646744433,'MachineRequested','{"kind":"MachineRequested","machine":"first-1d9v9g-2","name":"worker-2","lane":1,"offer":{"place":"local","size":"process","usd_per_hour":0.0,"billing_step_s":1.0},"expires_at":1794827046744433}');
INSERT INTO "event" VALUES('first',6,1,1,1794812646883426,'MachineUp','{"kind":"MachineUp","machine":"first-1d9v9g-1","address":"@FOLDER@/home/.machines/first-1d9v9g-1","node":"vm","timings":{"boot":0.138}}');
INSERT INTO "event" VALUES('first',7,1,1,1794812646887466,'MachineReady','{"kind":"MachineReady","machine":"first-1d9v9g-1","timings":{"boot":0.138,"probe":0.0,"setup":0.004}}');
INSERT INTO "event" VALUES('first',8,1,1,1794812646887466,'AttemptStarted','{"kind":"AttemptStarted","attempt":"add_1.0","task":"add_1","machine":"first-1d9v9g-1"}');
INSERT INTO "event" VALUES('first',9,1,1,1794812646922053,'MachineUp','{"kind":"MachineUp","machine":"first-1d9v9g-2","address":"@FOLDER@/home/.machines/first-1d9v9g-2","node":"vm","timings":{"boot":0.177}}');
INSERT INTO "event" VALUES('first',10,1,1,1794812646927062,'MachineReady','{"kind":"MachineReady","machine":"first-1d9v9g-2","timings":{"boot":0.177,"probe":0.0,"setup":0.005}}');
INSERT INTO "event" VALUES('first',11,1,1,1794812646927062,'AttemptStarted','{"kind":"AttemptStarted","attempt":"add_2.0","task":"add_2","machine":"first-1d9v9g-2"}');
INSERT INTO "event" VALUES('first',12,1,1,1794812648150722,'AttemptEnded','{"kind":"AttemptEnded","attempt":"add_1.0","outcome":{"type":"scored","score":1.0,"success":true,"num_steps":1},"seconds":1.259,"node":"vm"}');
INSERT INTO "event" VALUES('first',13,1,1,1794812648150722,'AttemptStarted','{"kind":"AttemptStarted","attempt":"add_3.0","task":"add_3","machine":"first-1d9v9g-1"}');
INSERT INTO "event" VALUES('first',14,1,1,1794812648208605,'AttemptCollected','{"kind":"AttemptCollected","attempt":"add_1.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('first',15,1,1,1794812648230971,'AttemptEnded','{"kind":"AttemptEnded","attempt":"add_2.0","outcome":{"type":"scored","score":1.0,"success":true,"num_steps":1},"seconds":1.29,"node":"vm"}');
INSERT INTO "event" VALUES('first',16,1,1,1794812648230971,'AttemptStarted','{"kind":"AttemptStarted","attempt":"times_1.0","task":"times_1","machine":"first-1d9v9g-2"}');
INSERT INTO "event" VALUES('first',17,1,1,1794812648289961,'AttemptCollected','{"kind":"AttemptCollected","attempt":"add_2.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('first',18,1,1,1794812649458680,'AttemptEnded','{"kind":"AttemptEnded","attempt":"add_3.0","outcome":{"type":"scored","score":1.0,"success":true,"num_steps":1},"seconds":1.301,"node":"vm"}');
INSERT INTO "event" VALUES('first',19,1,1,1794812649458680,'AttemptStarted','{"kind":"AttemptStarted","attempt":"times_2.0","task":"times_2","machine":"first-1d9v9g-1"}');
INSERT INTO "event" VALUES('first',20,1,1,1794812649513532,'AttemptCollected','{"kind":"AttemptCollected","attempt":"add_3.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('first',21,1,1,1794812649532120,'AttemptEnded','{"kind":"AttemptEnded","attempt":"times_1.0","outcome":{"type":"scored","score":1.0,"success":true,"num_steps":1},"seconds":1.284,"node":"vm"}');
INSERT INTO "event" VALUES('first',22,1,1,1794812649532120,'AttemptStarted','{"kind":"AttemptStarted","attempt":"times_3.0","task":"times_3","machine":"first-1d9v9g-2"}');
INSERT INTO "event" VALUES('first',23,1,1,1794812649590202,'AttemptCollected','{"kind":"AttemptCollected","attempt":"times_1.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('first',24,1,1,1794812650724990,'AttemptEnded','{"kind":"AttemptEnded","attempt":"times_2.0","outcome":{"type":"scored","score":0.0,"num_steps":1},"seconds":1.26,"node":"vm"}');
INSERT INTO "event" VALUES('first',25,1,1,1794812650777508,'AttemptCollected','{"kind":"AttemptCollected","attempt":"times_2.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('first',26,1,1,1794812650817441,'AttemptEnded','{"kind":"AttemptEnded","attempt":"times_3.0","outcome":{"type":"scored","score":0.0,"num_steps":1},"seconds":1.273,"node":"vm"}');
INSERT INTO "event" VALUES('first',27,1,1,1794812650817441,'MachineCondemned','{"kind":"MachineCondemned","machine":"first-1d9v9g-1","detail":"the run is over"}');
INSERT INTO "event" VALUES('first',28,1,1,1794812650817441,'MachineCondemned','{"kind":"MachineCondemned","machine":"first-1d9v9g-2","detail":"the run is over"}');
INSERT INTO "event" VALUES('first',29,1,1,1794812650840767,'AttemptCollected','{"kind":"AttemptCollected","attempt":"times_3.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('first',30,1,1,1794812650840767,'MachineDeleted','{"kind":"MachineDeleted","machine":"first-1d9v9g-1","gone_at":1794812650840734}');
INSERT INTO "event" VALUES('first',31,1,1,1794812650853527,'MachineDeleted','{"kind":"MachineDeleted","machine":"first-1d9v9g-2","gone_at":1794812650853494}');
INSERT INTO "event" VALUES('first',32,1,1,1794812650853527,'RunEnded','{"kind":"RunEnded","status":"done"}');
INSERT INTO "event" VALUES('second',1,0,1,1794812651451832,'RunPlanned','{"kind":"RunPlanned","plan":{"run":"second","benchmark":"mybench","places":["local"],"benchmark_spec":{"kind":"command","spec":{"command":["python3","agent.py"],"digest":"40625d62ecfb8b17f81317973db64375552a39d446f71776cb1c6af933b27233","files":["agent.py"],"name":"mybench","needs":{},"root":"@FOLDER@"}},"place_specs":{"local":{"base":"@FOLDER@","kind":"local","settings":{}}},"settings":{},"agent":{},"limits":{"max_duration_s":4.0,"boot_timeout_s":1800.0},"verdict":{},"home":"1d9v9g"},"total":6}');
INSERT INTO "event" VALUES('second',2,0,1,1794812651451832,'TasksPlanned','{"kind":"TasksPlanned","tasks":[{"id":"add_1","domain":"add","params":{"answer":"5","question":"2 + 3"},"timeout_s":10.0,"weight_s":1.259,"stall_s":0.0},{"id":"add_2","domain":"add","params":{"answer":"42","question":"17 + 25"},"timeout_s":10.0,"weight_s":1.29,"stall_s":0.0},{"id":"add_3","domain":"add","params":{"answer":"676","question":"640 + 36"},"timeout_s":10.0,"weight_s":1.301,"stall_s":0.0},{"id":"times_1","domain":"times","params":{"answer":"4","question":"2 * 2"},"timeout_s":10.0,"weight_s":1.284,"stall_s":0.0},{"id":"times_2","domain":"times","params":{"answer":"42","question":"6 * 7"},"timeout_s":10.0,"weight_s":1.26,"stall_s":0.0},{"id":"times_3","domain":"times","params":{"answer":"144","question":"12 * 12"},"timeout_s":10.0,"weight_s":1.273,"stall_s":0.0}]}');
INSERT INTO "event" VALUES('second',3,1,1,1794812651474299,'ControllerStarted','{"kind":"ControllerStarted","host":"vm","pid":14955,"version":"0.1.0"}');
INSERT INTO "event" VALUES('second',4,1,1,1794812651477239,'MachineRequested','{"kind":"MachineRequested","machine":"second-1d9v9g-1","name":"worker-1","lane":0,"offer":{"place":"local","size":"process","usd_per_hour":0.0,"billing_step_s":1.0},"expires_at":1794812655451832}');
INSERT INTO "event" VALUES('second',5,1,1,1794812651542772,'MachineUp','{"kind":"MachineUp","machine":"second-1d9v9g-1","address":"@FOLDER@/home/.machines/second-1d9v9g-1","node":"vm","timings":{"boot":0.064}}');
INSERT INTO "event" VALUES('second',6,1,1,1794812651545014,'MachineReady','{"kind":"MachineReady","machine":"second-1d9v9g-1","timings":{"boot":0.064,"probe":0.0,"setup":0.003}}');
INSERT INTO "event" VALUES('second',7,1,1,1794812651545014,'AttemptStarted','{"kind":"AttemptStarted","attempt":"add_3.0","task":"add_3","machine":"second-1d9v9g-1"}');
INSERT INTO "event" VALUES('second',8,1,1,1794812652718714,'AttemptEnded','{"kind":"AttemptEnded","attempt":"add_3.0","outcome":{"type":"scored","score":1.0,"success":true,"num_steps":1},"seconds":1.171,"node":"vm"}');
INSERT INTO "event" VALUES('second',9,1,1,1794812652718714,'AttemptStarted','{"kind":"AttemptStarted","attempt":"add_2.0","task":"add_2","machine":"second-1d9v9g-1"}');
INSERT INTO "event" VALUES('second',10,1,1,1794812652775436,'AttemptCollected','{"kind":"AttemptCollected","attempt":"add_3.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('second',11,1,1,1794812653931697,'AttemptEnded','{"kind":"AttemptEnded","attempt":"add_2.0","outcome":{"type":"scored","score":1.0,"success":true,"num_steps":1},"seconds":1.203,"node":"vm"}');
INSERT INTO "event" VALUES('second',12,1,1,1794812653931697,'AttemptStarted','{"kind":"AttemptStarted","attempt":"times_1.0","task":"times_1","machine":"second-1d9v9g-1"}');
INSERT INTO "event" VALUES('second',13,1,1,1794812653984522,'AttemptCollected','{"kind":"AttemptCollected","attempt":"add_2.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('second',14,1,1,1794812654459262,'MachineExtended','{"kind":"MachineExtended","machine":"second-1d9v9g-1","expires_at":1794812655451832}');
INSERT INTO "event" VALUES('second',15,1,1,1794812655132026,'AttemptEnded','{"kind":"AttemptEnded","attempt":"times_1.0","outcome":{"type":"scored","score":1.0,"success":true,"num_steps":1},"seconds":1.196,"node":"vm"}');
INSERT INTO "event" VALUES('second',16,1,1,1794812655132026,'AttemptStarted','{"kind":"AttemptStarted","attempt":"times_3.0","task":"times_3","machine":"second-1d9v9g-1"}');
INSERT INTO "event" VALUES('second',17,1,1,1794812655196797,'AttemptCollected','{"kind":"AttemptCollected","attempt":"times_1.0","collected":{"files":1,"bytes":30}}');
INSERT INTO "event" VALUES('second',18,1,1,1794812655205454,'MachineExtended','{"kind":"MachineExtended","machine":"second-1d9v9g-1","expires_at":1794812655451832}');
INSERT INTO "event" VALUES('second',19,1,1,1794812655394472,'MachineExtended','{"kind":"MachineExtended","machine":"second-1d9v9g-1","expires_at":1794812655451832}');
INSERT INTO "event" VALUES('second',20,1,1,1794812655439079,'MachineCondemned','{"kind":"MachineCondemned","machine":"second-1d9v9g-1","detail":"the run''s time limit is near"}');
INSERT INTO "event" VALUES('second',21,1,1,1794812655439079,'AttemptEnded','{"kind":"AttemptEnded","attempt":"times_3.0","outcome":{"type":"broken","cause":"cancelled","detail":"the run''s time limit is near"},"seconds":0.307053}');
INSERT INTO "event" VALUES('second',22,1,1,1794812655453020,'AttemptCollected','{"kind":"AttemptCollected","attempt":"times_3.0","collected":{}}');
INSERT INTO "event" VALUES('second',23,1,1,1794812655453020,'StopRequested','{"kind":"StopRequested","reason":"time","detail":"the time limit of 4 s is over"}');
INSERT INTO "event" VALUES('second',24,1,1,1794812655491044,'MachineDeleted','{"kind":"MachineDeleted","machine":"second-1d9v9g-1","gone_at":1794812655491007}');
INSERT INTO "event" VALUES('second',25,1,1,1794812655491044,'RunEnded','{"kind":"RunEnded","status":"stopped"}');
CREATE TABLE hold (
    machine TEXT PRIMARY KEY,
    pool TEXT NOT NULL,
    number INTEGER NOT NULL,
    holder TEXT,
    borrower TEXT UNIQUE,
    epoch INTEGER NOT NULL,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE meta (home_id TEXT NOT NULL) STRICT;
INSERT INTO "meta" VALUES('1d9v9g');
CREATE TABLE request (
    id INTEGER PRIMARY KEY,
    stream TEXT NOT NULL,
    at INTEGER NOT NULL,
    v INTEGER NOT NULL,
    body TEXT NOT NULL,
    answered INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE stream (
    name TEXT PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('run', 'pool')),
    epoch INTEGER NOT NULL,
    holder TEXT,
    lease_until INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "stream" VALUES('first','run',1,NULL,0,1794812646660487);
INSERT INTO "stream" VALUES('second','run',1,NULL,0,1794812651451832);
CREATE INDEX request_open ON request (stream) WHERE answered = 0;
COMMIT;
