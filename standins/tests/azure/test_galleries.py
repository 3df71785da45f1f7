"""The stand-in's galleries: what becomes an image, and what is made from one."""

from __future__ import annotations

from tests.cloud.rest import DEFINITION, Rest, compute, version_of, vm_body

GALLERY = "/resourceGroups/rg/providers/Microsoft.Compute/galleries/g"


def test_only_a_stopped_and_generalized_machine_becomes_an_image(rest: Rest) -> None:
    wrong = GALLERY.replace("galleries/g", "galleries/g-1")
    assert rest.ask("PUT", wrong, {"location": "eastus"}).code == "InvalidResourceName"
    image, one = f"{GALLERY}/images/waa", f"{GALLERY}/images/waa/versions/1.0.0"
    assert rest.ask("PUT", image, DEFINITION).code == "ParentResourceNotFound"
    rest.put(GALLERY, {"location": "eastus"})
    assert rest.ask("PUT", image, {"location": "eastus"}).code == "InvalidParameter"
    rest.put(image, DEFINITION)
    assert rest.ask("PUT", f"{GALLERY}/images/other", DEFINITION).code == "Conflict"
    rest.new_vm("vm")
    body = version_of(rest, "vm", "eastus", "westus2")
    assert rest.ask("POST", f"{compute('vm')}/generalize").code == "OperationNotAllowed"
    rest.act(f"{compute('vm')}/deallocate")
    assert "different OS state" in rest.ask("PUT", one, body).body["error"]["message"]
    assert rest.ask("POST", f"{compute('vm')}/generalize").status == 200
    assert rest.ask("POST", f"{compute('vm')}/start").code == "OperationNotAllowed"
    assert rest.ask("PUT", one.replace("1.0.0", "first"), body).code == "InvalidResourceName"
    assert rest.ask("PUT", one, version_of(rest, "vm", "westus2")).code == "InvalidParameter"
    rest.put(one, body)
    assert rest.ask("DELETE", GALLERY).code == "CannotDeleteResource"


def test_an_image_of_ones_own_must_exist_and_be_where_the_machine_is(rest: Rest) -> None:
    rest.put(GALLERY, {"location": "eastus"})
    rest.put(f"{GALLERY}/images/waa", DEFINITION)
    rest.new_vm("source")
    rest.act(f"{compute('source')}/deallocate")
    rest.ask("POST", f"{compute('source')}/generalize")
    rest.put(f"{GALLERY}/images/waa/versions/1.0.0", version_of(rest, "source", "eastus"))
    rest.delete(compute("source"))
    body = vm_body("vm", rest.new_interface("vm"))
    reference = {"id": rest.root + f"{GALLERY}/images/waa/versions/2.0.0"}
    body["properties"]["storageProfile"]["imageReference"] = reference
    assert rest.ask("PUT", compute("vm"), body).code == "GalleryImageNotFound"
    reference["id"] = rest.root + f"{GALLERY}/images/waa/versions/1.0.0"
    body["properties"]["storageProfile"]["osDisk"]["diskSizeGB"] = 64
    assert rest.ask("PUT", compute("vm"), body).code == "InvalidParameter"
    body["properties"]["storageProfile"]["osDisk"]["diskSizeGB"] = 128
    rest.put(compute("vm"), body)
    elsewhere = {**body, "location": "westus2"}
    assert rest.ask("PUT", compute("other"), elsewhere).code == "GalleryImageNotFound"
