-- A home of database layout 1 and event schema 1, written by hand. It must open for ever: never edit it
-- once released; later layouts and schemas get files of their own beside it.
PRAGMA application_id = 1165380678;
PRAGMA user_version = 1;
CREATE TABLE meta (home_id TEXT NOT NULL) STRICT;
CREATE TABLE stream (
    name TEXT PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('run', 'pool')),
    epoch INTEGER NOT NULL,
    holder TEXT,
    lease_until INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
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
CREATE TABLE request (
    id INTEGER PRIMARY KEY,
    stream TEXT NOT NULL,
    at INTEGER NOT NULL,
    v INTEGER NOT NULL,
    body TEXT NOT NULL,
    answered INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX request_open ON request (stream) WHERE answered = 0;

INSERT INTO meta VALUES ('k3x9q0');
INSERT INTO stream VALUES ('first', 'run', 1,
    '{"pid":4711,"host":"old-laptop","computer":"gone","since":1700000000000000}', 1700000030000000, 1700000000000000);
INSERT INTO event VALUES
('first', 1, 0, 1, 1700000000000000, 'RunPlanned',
 '{"kind":"RunPlanned","plan":{"run":"first","benchmark":"command","model":"m-1"},"total":2}'),
('first', 2, 0, 1, 1700000000000000, 'TasksPlanned',
 '{"kind":"TasksPlanned","tasks":[{"id":"a","domain":"café"},{"id":"b","params":{"n":1},"timeout_s":60.0}]}'),
('first', 3, 1, 1, 1700000001000000, 'ControllerStarted',
 '{"kind":"ControllerStarted","host":"old-laptop","pid":4711,"version":"0.1.0"}'),
('first', 4, 1, 1, 1700000002000000, 'AttemptStarted',
 '{"kind":"AttemptStarted","attempt":"a.1","task":"a","machine":"first-k3x9q0-1"}'),
('first', 5, 1, 1, 1700000003000000, 'AttemptEnded',
 '{"kind":"AttemptEnded","attempt":"a.1","outcome":{"type":"scored","score":0.5},"seconds":1.0}'),
('first', 6, 1, 1, 1700000004000000, 'StopRequested',
 '{"kind":"StopRequested","reason":"user"}');
INSERT INTO request VALUES (1, 'first', 1700000003500000, 1, '{"kind":"StopRequested","reason":"user"}', 1);
INSERT INTO request VALUES (2, 'first', 1700000005000000, 1, '{"kind":"StopRequested","reason":"user","drain":true}', 0);
